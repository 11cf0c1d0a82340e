"""Check `frozen`: the servers of opponents and of a teacher, those that run and those that a run starts."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import trio

from agentrl.config.distillation import TEACHER_SERVERS
from agentrl.config.frozen_servers import FrozenPlan, FrozenServersConfig
from agentrl.config.opponents import opponent_key
from agentrl.config.schema import Config
from agentrl.config.storage_urls import is_url
from agentrl.data.model_source import is_hub_id
from agentrl.errors import ConfigError, ServerError, UserError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.servers import ask, judge_facts, judge_sglang, why_not_loaded
from agentrl.extras.doctor.subject import Subject, model_folder
from agentrl.extras.embedded.server import named_key
from agentrl.rollout.frozen_models import resolve_servers
from agentrl.servers.client import SGLangClient
from agentrl.servers.frozen import start_frozen
from agentrl.servers.trio_run import in_trio
from agentrl.types import SamplingParams

START_S = 180.0
"""A server that a run waits longer for is called wrong here: the check has other models to start, too."""
GENERATE_S = 20.0
NUM_TOKENS = 4


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Compare the tokenizers, ask the servers that run, and start one server of each model that a run starts
    embedded ones for.
    """
    if not subject.is_given:
        return
    config = subject.config
    refused = set()
    for key, servers in _sections(config).items():
        if (why := _refusal(config, key, servers)) is not None:
            refused.add(key)
            yield Diagnosis(key, "wrong", why, "see docs/agents.md, or docs/algorithms.md for a teacher")
            continue
        for url in servers.urls:
            yield _ask(f"{key} {url}", url, servers.api_key_env)
    plans = [plan for plan in config.frozen_plans if plan.key not in refused]
    if config.rollout.backend == "embedded":
        for plan in plans:
            yield try_start(plan)
    elif plans and not config.rollout.num_started:  # else the check `servers` looks for it
        yield judge_sglang(config.rollout.sglang.python or sys.executable)


def try_start(plan: FrozenPlan) -> Diagnosis:
    """Start one of the servers of a frozen model, and let it sample a few tokens."""
    if (why := why_not_loaded(plan.model.path)) is not None:
        return Diagnosis(plan.key, "ok", f"its server was not started: {why}")
    rollout = plan.rollout.model_copy(
        update={
            "num_servers": 1,
            "server_start_timeout_s": min(START_S, plan.rollout.server_start_timeout_s),
            "max_server_restarts": 0,
        }
    )
    logging.getLogger("agentrl").setLevel(logging.WARNING)
    began = time.monotonic()
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".agentrl-doctor-") as logs,
            start_frozen([replace(plan, rollout=rollout)], Path(logs), say=lambda text: None) as started,
        ):
            seconds = time.monotonic() - began
            [(url, api_key)] = started.keys()[plan.key].items()
            in_trio(_sample, url, api_key)
    except ServerError as error:
        cure = f"a model folder that the embedded server loads: {plan.key}.model.path"
        return Diagnosis(plan.key, "wrong", str(error), cure)
    text = f"a server of {plan.model.path} starts in {seconds:.1f} s, and samples"
    return Diagnosis(plan.key, "ok", text, figures={"start_s": seconds})


def _sections(config: Config) -> dict[str, FrozenServersConfig]:
    """Return the sections of all frozen models on servers, by their keys."""
    found: dict[str, FrozenServersConfig] = {
        opponent_key(name): one for name, one in config.agent.opponents.items()
    }
    if config.algorithm.distillation.asks_servers:
        found[TEACHER_SERVERS] = config.algorithm.distillation.servers
    return found


def _refusal(config: Config, key: str, servers: FrozenServersConfig) -> str | None:
    """Return why a run would refuse a frozen model; None if it would not, or if a model is elsewhere."""
    path = servers.model.path
    if model_folder(config.model.path) is None or is_hub_id(path) or is_url(path):
        return None
    try:
        resolve_servers(servers, config.model, key=key)
    except ConfigError as error:
        return str(error).removeprefix(f"{key}: ")
    return None


def _ask(part: str, url: str, key_variable: str | None) -> Diagnosis:
    try:
        return judge_facts(in_trio(ask, url, named_key(key_variable)), part)
    except (ServerError, UserError) as error:
        return Diagnosis(part, "wrong", str(error), f"start it first: `curl {url}/server_info`")


async def _sample(url: str, api_key: str | None) -> None:
    client = SGLangClient(url, api_key=api_key, unpublished=0)
    try:
        with trio.fail_after(GENERATE_S):
            await client.generate([0], SamplingParams(max_new_tokens=NUM_TOKENS), rid="doctor")
    except trio.TooSlowError:
        raise ServerError(f"{url} did not generate within {GENERATE_S:g} s") from None
    finally:
        await client.aclose()
