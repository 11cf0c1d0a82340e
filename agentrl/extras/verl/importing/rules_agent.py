"""Translation rules for agents, rewards and validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.extras.verl.importing.findings import Dropped, Finding, Setting
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.extras.verl.importing.values import VALUES

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
AGENTS = ("single_turn_agent", "tool_agent")
"""Agent loops of verl that exist here under the same names."""
OVERLONG = (
    *("custom_reward_function.overlong_buffer", "reward_model.overlong_buffer"),
    *("reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg"),
)
"""Keys of the buffer for DAPO's length penalty, in different versions of verl."""
SCORE_OPTIONS = ("reward_model.reward_kwargs", "reward.reward_kwargs", "reward_model")
"""Sections in which forks of verl have options of its own scoring functions."""
OFFERS = tuple(
    f"{TURNS}.{name}" for name in ("tool_config_path", "function_tool_path", "interaction_config_path")
)
"""Keys that lead to conversations with several turns."""
CUSTOM = ("custom_reward_function", "reward.custom_reward_function")
MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
FILES = ("data.train_files", "data.val_files")
FILTER = "algorithm.filter_groups"


def agents(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the agent of rows that name none, and its limit of turns."""
    loop, enable = f"{ROLLOUT}.agent.default_agent_loop", f"{TURNS}.enable"
    if source.has(loop) and source.get(loop) in AGENTS:
        yield Setting("agent.default", source.get(loop), (loop,))
    elif source.has(loop):
        why = (
            f"{source.get(loop)} is your own class; write it as a plugin (`agentrl new agent NAME`) and set "
            "agent.default to it"
        )
        yield Dropped(loop, why, is_decisive=True)
    elif source.get(enable) and source.has(f"{TURNS}.tool_config_path"):
        yield Setting("agent.default", "tool_agent", (enable,), "a row's agent_name takes precedence")
    bounds = [key for key in (f"{TURNS}.max_assistant_turns", f"{TURNS}.max_turns") if source.has(key)]
    yield from (Setting("agent.max_turns", source.get(key), (key,)) for key in bounds)
    if source.get(enable) or any(map(source.has, OFFERS)):
        if not bounds:
            tokens = "data.max_response_length"
            note = "unlimited in verl, where only the tokens of the response end an attempt"
            key = f"{TURNS}.max_assistant_turns"
            yield Setting("agent.max_turns", source.get(tokens), (key, tokens), note)
        calls, length = f"{TURNS}.max_parallel_calls", f"{TURNS}.max_tool_response_length"
        if not source.has(calls):
            yield Setting("agent.max_tool_calls_per_turn", 1, (calls,))
        if not source.has(length):
            yield Setting(
                "agent.max_tool_output_tokens", VALUES[length](256), (length,), "256 characters there"
            )


def validation(source: WrittenConfig) -> Iterator[Finding]:
    """Translate validation sampling; verl's `do_sample: false` is a temperature of 0 here."""
    section = f"{ROLLOUT}.val_kwargs"
    sample = f"{section}.do_sample"
    if source.has(sample) and not source.get(sample):
        yield Setting("eval.temperature", 0.0, (sample,))
        for name in ("temperature", "top_p", "top_k"):
            if source.has(f"{section}.{name}"):
                yield Dropped(f"{section}.{name}", "do_sample is false: validation is greedy")
    elif source.has(sample):
        yield Setting(
            "eval.temperature",
            source.get(f"{section}.temperature") or 0.0,
            (sample, f"{section}.temperature"),
        )


def rewards(source: WrittenConfig) -> Iterator[Finding]:
    """Translate reward functions and verl's reward managers."""
    section = next((name for name in CUSTOM if source.has(f"{name}.path")), None)
    if section is not None:
        yield Setting("reward.custom_function.path", source.get(f"{section}.path"), (f"{section}.path",))
        if source.has(f"{section}.name"):
            yield Setting("reward.custom_function.name", source.get(f"{section}.name"), (f"{section}.name",))
        kwargs = source.below(f"{section}.reward_kwargs")
        if kwargs:
            yield Setting(
                "reward.custom_function.kwargs",
                kwargs,
                tuple(f"{section}.reward_kwargs.{name}" for name in kwargs),
            )
    else:
        names = (f"{name}.name" for name in CUSTOM)
        yield from (
            Dropped(name, "without a path: rewards are chosen by data_source, as in verl")
            for name in names
            if source.has(name)
        )
    for key in MANAGERS:
        if source.has(key):
            yield from _manager(key, source.get(key), has_function=section is not None)
    yield from _scores(source)
    if section is None:
        yield from _scores_of_dapo(source)
    yield from _length_penalty(source)
    yield from _filter(source, has_function=section is not None)
    yield from _reward_model(source)


def _manager(key: str, name: str, *, has_function: bool) -> Iterator[Finding]:
    if name == "batch" and has_function:
        yield Setting("reward.custom_function.scope", "batch", (key,), "called with lists, once per batch")
    elif name == "prime" and has_function:
        yield Setting("reward.custom_function.runs_in", "process", (key,))
    elif name == "dapo" and not has_function:
        return  # it scores wrong answers otherwise: `_scores_of_dapo`
    elif name in ("naive", "dapo", "prime", "batch"):
        yield Dropped(
            key,
            "nothing to set: each reward is called for its row as soon as the attempt ends (docs/rewards.md)",
        )
    else:
        why = (
            f"{name} is your own class; a reward declares itself whether it sees an attempt, a group or a "
            "batch (docs/rewards.md)"
        )
        yield Dropped(key, why, is_decisive=True)


def _scores(source: WrittenConfig) -> Iterator[Finding]:
    """Translate options of verl's scoring functions to options of the corresponding rewards."""
    for section in SCORE_OPTIONS:
        options: dict[str, Any] = {}
        form, method, score = (f"{section}.{name}" for name in ("format_score", "method", "score"))
        if source.has(form):
            options["format_score"] = source.get(form)
        if source.get(method) in ("strict", "flexible"):
            options["strict"] = source.get(method) == "strict"
        if options:
            old = tuple(key for key in (form, method) if source.has(key))
            yield Setting("reward.reward_config.gsm8k", options, old, "for rows of gsm8k")
        if source.has(form):
            yield Setting(
                "reward.reward_config.math", {"format_score": source.get(form)}, (form,), "for rows of math"
            )
        if source.has(score) and source.get(score) != 1:
            yield Dropped(score, "a right answer earns 1; scale it by reward.weight", is_decisive=True)
        elif source.has(score):
            yield Dropped(score, "a right answer earns 1, here too")


def _scores_of_dapo(source: WrittenConfig) -> Iterator[Finding]:
    """Translate verl's score of a wrong answer to rows of DAPO's data: -1 where other rows get 0."""
    keys = tuple(key for key in (*MANAGERS, *FILES) if "dapo" in str(source.get(key)).lower())
    if keys:
        note = "rows of math_dapo, math and aime* score -1 or 1 in verl; those of lighteval/MATH 0 or 1"
        for name in ("math", "aime"):
            yield Setting(f"reward.reward_config.{name}.wrong_score", -1, keys, note)


def _filter(source: WrittenConfig, *, has_function: bool) -> Iterator[Finding]:
    """Refuse a measure of groups to drop that is not the whole reward."""
    enable, metric = f"{FILTER}.enable", f"{FILTER}.metric"
    has_penalty = any(source.get(f"{section}.enable") for section in OVERLONG)
    has_kl = bool(source.get("algorithm.use_kl_in_reward"))
    reasons = {
        "seq_reward": "",
        "seq_final_reward": "the KL is part of the reward that verl compares" if has_kl else "",
        "acc": "the length penalty is part of the reward that is compared here" if has_penalty else "",
    }
    why = reasons.get(source.get(metric), f"{source.get(metric)} is not compared")
    if source.get(metric) == "acc" and has_function and not why:
        why = "your function's acc may differ from its score"
    if not (source.get(enable) and source.has(metric)):
        return
    rest = "groups are dropped if all attempts earned the same reward (buffer.drop_constant_groups)"
    yield Dropped(metric, f"{why}; {rest}" if why else rest, is_decisive=bool(why))


def _length_penalty(source: WrittenConfig) -> Iterator[Finding]:
    for section in OVERLONG:
        options = source.below(section)
        keys = tuple(f"{section}.{name}" for name in options)
        if options.get("enable"):
            term: dict[str, Any] = {"weight": options.get("penalty_factor") or 1.0}
            if options.get("len"):
                term["config"] = {"buffer_tokens": options["len"]}
            yield Setting("reward.terms.length_penalty", term, keys)
        else:
            yield from (Dropped(key, "without effect in verl: the overlong buffer is off") for key in keys)


def _reward_model(source: WrittenConfig) -> Iterator[Finding]:
    """Translate the reward model.

    In verl, its score replaces that of the function. Here it is a term, and the row's own reward has weight
    0.
    """
    for enable, path in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        if source.get(enable) and source.has(path):
            yield Setting("reward_model.model.path", source.get(path), (path, enable))
            yield Setting("reward.terms.reward_model", {"weight": 1.0}, (enable,), "the term that uses it")
            yield Setting("reward.weight", 0.0, (enable,), "the row's own reward is only reported")
        elif source.has(path):
            yield Dropped(path, "without effect in verl: no reward model is enabled")


RULES = (agents, validation, rewards)
