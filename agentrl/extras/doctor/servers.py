"""Check `servers`: those that the config names, and whether SGLang is there if the run starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import trio

import agentrl
from agentrl.config.model_size import ModelSize
from agentrl.config.rollout import RolloutConfig
from agentrl.errors import ServerError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.local_policy import open_policy
from agentrl.extras.doctor.subject import Subject, model_folder
from agentrl.extras.embedded.server import named_key
from agentrl.loopback import is_local
from agentrl.servers.client import SGLangClient
from agentrl.servers.health import EMBEDDED_BACKEND, ServerKind
from agentrl.servers.protocol import parse_num_ranks
from agentrl.servers.trio_run import in_trio
from agentrl.weights.transport import LearnerCalls
from agentrl.weights.verify import ROUNDED_TOLERANCE, TOLERANCES, Verifier, served_dtype

ANSWER_S = 10.0
GENERATE_S = 20.0
UNPUBLISHED = 0
"""Version that stands for the weights that a server was started with."""
MAX_PARAMETERS = 2_000_000_000
"""Of a model whose forward is computed here: more takes too long to load."""
_VERSION_OF_SGLANG = "from importlib.metadata import version; print(version('sglang'))"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. published: version of its weights; None: those it was started with."""

    url: str
    kind: ServerKind
    version: str
    num_ranks: int
    dtype: str | None
    model_path: str
    published: int | None
    is_paused: bool

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.version}, {self.num_ranks} rank{'s' * (self.num_ranks > 1)}, "
            f"{self.dtype or 'dtype of its files'}, {self.model_path}"
        )


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Ask each server what it is, and compare its log-probabilities with the learner's forward."""
    rollout = subject.config.rollout
    if not subject.is_given:
        return
    if rollout.num_started and rollout.backend == "sglang":
        yield judge_sglang(rollout.sglang.python or sys.executable)
    key = named_key(rollout.api_key_env)
    facts = []
    for url in rollout.urls:
        try:
            facts.append(found := in_trio(ask, url, key))
        except ServerError as error:
            cure = f"start it, or check rollout.urls and rollout.api_key_env: `curl {url}/server_info`"
            yield Diagnosis(_part(url), "wrong", str(error), cure)
        else:
            yield judge_server(found, rollout)
    comparable = [one for one in facts if one.published is None and not one.is_paused]
    for one in facts:
        if one.published is not None:
            text = f"has version {one.published} of a run, so its weights were not compared with the model"
            yield Diagnosis(f"{_part(one.url)} weights", "ok", text)
    if comparable:
        yield from _compare_weights(subject, comparable, key)


def judge_server(found: ServerFacts, rollout: RolloutConfig) -> Diagnosis:
    """Judge what a server says of itself."""
    part, transport = _part(found.url), rollout.weights.transport
    is_here = is_local(urlsplit(found.url).hostname or "")
    if not found.is_paused and transport == "tensor" and (found.kind == "embedded" or not is_here):
        why = "another machine" if found.kind == "sglang" else "the embedded server"
        cure = "rollout.weights.transport=disk or distributed"
        return Diagnosis(part, "wrong", f"{found}; transport=tensor does not reach {why}", cure)
    return judge_facts(found, part)


def judge_facts(found: ServerFacts, part: str) -> Diagnosis:
    """Judge what holds for any server, whether it is published to or not."""
    if found.is_paused:
        cure = f"`curl -X POST {found.url}/continue_generation -d '{{}}'`, unless a run is publishing to it"
        return Diagnosis(part, "wrong", f"{found}; it is paused", cure)
    own = f"agentrl-{agentrl.__version__}"
    if found.kind == "embedded" and found.version != own:
        return Diagnosis(part, "slow", f"{found}; this is {own}", "the same version on both sides")
    return Diagnosis(part, "ok", str(found))


def judge_difference(found: ServerFacts, difference: float) -> Diagnosis:
    """Judge the mean absolute difference of log-probabilities, in nats, between a server and the learner."""
    tolerance = TOLERANCES.get(found.dtype or "", ROUNDED_TOLERANCE)
    text = f"log-probabilities differ from the learner's by {difference:.2g} on average"
    figures = {"logprob_difference": difference}
    part = f"{_part(found.url)} weights"
    if not difference <= tolerance:
        text = f"{text}, more than {tolerance:g}: other weights than model.path, or another number format"
        cure = f"start the server with the model of the config (it has {found.model_path})"
        return Diagnosis(part, "wrong", text, cure, figures)
    return Diagnosis(part, "ok", text, figures=figures)


async def ask(url: str, key: str | None) -> ServerFacts:
    """Return what a server says of itself.

    Raises:
        ServerError: it does not answer within ANSWER_S.
    """
    client = SGLangClient(url, api_key=key)
    try:
        with trio.fail_after(ANSWER_S):
            info, model = await client.server_info(), await client.model_info()
            return ServerFacts(
                url,
                "embedded" if info.get("backend") == EMBEDDED_BACKEND else "sglang",
                str(info.get("version", "of an unknown version")),
                parse_num_ranks(info, server=url),
                served_dtype(info),
                model.model_path,
                model.version,
                await client.is_paused(),
            )
    except trio.TooSlowError:
        raise ServerError(f"{url} did not answer within {ANSWER_S:g} s") from None
    finally:
        await client.aclose()


def _compare_weights(subject: Subject, servers: list[ServerFacts], key: str | None) -> Iterator[Diagnosis]:
    config = subject.config
    if (why := why_not_loaded(config.model.path)) is not None:
        for server in servers:
            yield Diagnosis(f"{_part(server.url)} weights", "ok", f"not compared with the learner: {why}")
        return
    with open_policy(config.model, temperature=config.rollout.temperature) as policy:
        verifier = Verifier(LearnerCalls(policy), is_alone=False, temperature=config.rollout.temperature)
        for server in servers:
            try:
                difference = in_trio(_sample, verifier, server.url, key)
            except ServerError as error:
                part = f"{_part(server.url)} weights"
                yield Diagnosis(part, "wrong", str(error), "see the server's log")
            else:
                yield judge_difference(server, difference)


async def _sample(verifier: Verifier, url: str, key: str | None) -> float:
    client = SGLangClient(url, api_key=key, unpublished=UNPUBLISHED)
    try:
        with trio.fail_after(GENERATE_S):
            return await verifier.sampled_difference(client, UNPUBLISHED)
    except trio.TooSlowError:
        raise ServerError(f"{url} did not generate within {GENERATE_S:g} s") from None
    finally:
        await client.aclose()


def why_not_loaded(path: str) -> str | None:
    """Return why a model is not loaded here; None if it can be. Nothing is downloaded."""
    folder = model_folder(path)
    if folder is None:
        return f"model.path={path!r} is not on this machine"
    size = ModelSize.read(str(folder))
    if size is None:
        return "the size of this kind of model is not known"
    billions = f"its {size.num_parameters / 1e9:.1f} billion parameters"
    if size.num_parameters > MAX_PARAMETERS:
        return f"{billions} take too long to load"
    # Float32, and once more while the files are read.
    if 8 * size.num_parameters > psutil.virtual_memory().available:
        return f"{billions} do not fit into the free memory"
    return None


def judge_sglang(python: str) -> Diagnosis:
    """Look for SGLang where servers would be started."""
    try:
        done = subprocess.run(
            [python, "-c", _VERSION_OF_SGLANG], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"{python} does not run: {error}"
        return Diagnosis("SGLang", "wrong", text, "rollout.sglang.python: a Python with SGLang")
    if done.returncode != 0:
        cure = "pip install 'agentrl[sglang]', or rollout.sglang.python: a Python with SGLang"
        return Diagnosis("SGLang", "wrong", f"not installed for {python}", cure)
    return Diagnosis("SGLang", "ok", f"{done.stdout.strip()} at {python}")


def _part(url: str) -> str:
    return f"server {url}"
