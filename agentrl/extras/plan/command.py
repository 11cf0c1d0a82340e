"""`agentrl plan`: a config for a model and a number of GPUs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.cli.options import Debug, Overrides
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config.schema import Config

_SIGMA = 0.8
"""Of the lognormal lengths that are planned for: one attempt in 1,000 is ten times as long as the median."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A known model, such as qwen3-8b, or a folder with config.json."
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the cluster.")] = 8,
    gpu: Annotated[
        Literal["a100", "h20", "h100", "h200", "b200"], typer.Option(help="Kind of the GPUs.")
    ] = "h100",
    context: Annotated[int, typer.Option(help="Tokens of the longest trajectory, prompt included.")] = 16384,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 1024,
    answer_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that an attempt samples on average; default: a quarter of the rest."),
    ] = None,
    groups: Annotated[int, typer.Option(help="Groups of a batch.")] = 128,
    group_size: Annotated[int, typer.Option(help="Attempts of a group.")] = 8,
    max_staleness: Annotated[
        int | None,
        typer.Option(help="The bound on staleness; default: the smallest that is nearly the fastest."),
    ] = None,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Leave out the simulations of the plan and the runners-up.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the config into this YAML file.")] = None,
    debug: Debug = False,
) -> None:
    """Plan a training: which GPUs learn and which serve, how, and how long a step is predicted to take.

    Overrides such as simulation.turns.mean=4 or model.lora.rank=32 hold for the plan. Without --out, the
    config is printed, with the prediction as comments.
    """
    from agentrl.extras.plan.plan import make_plan
    from agentrl.extras.plan.plan_text import check, plan_lines
    from agentrl.extras.plan.speeds import model_size
    from agentrl.extras.plan.written import config_yaml, refuse_out, write_yaml

    if out is not None:
        refuse_out(out, ".yaml")
    base = _base(
        base_values(
            model,
            gpu=gpu,
            context=context,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            groups=groups,
            group_size=group_size,
        ),
        overrides or [],
    )
    size = model_size(base)
    planned = make_plan(base, size, gpus, max_staleness=max_staleness)
    _refuse_overruled(overrides or [], base, planned.config)
    checked = [] if only_estimate else check(planned, base)
    lines = plan_lines(planned, checked, num_gpus=gpus)
    text = config_yaml(planned.config, lines)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_yaml(out, text)
    typer.echo("\n".join([*lines, "", f"wrote {out}; add data.train_files, tools and rewards"]))


def base_values(
    model: str,
    *,
    gpu: str = "h100",
    context: int = 16384,
    prompt_tokens: int = 1024,
    answer_tokens: int | None = None,
    groups: int = 128,
    group_size: int = 8,
) -> dict[str, Any]:
    """Return the parts of the config that do not depend on the plan."""
    response = context - prompt_tokens
    if response < 1:
        raise ConfigError(
            f"--context {context} leaves nothing beside --prompt-tokens {prompt_tokens}; use a larger context"
        )
    sampled = response // 4 if answer_tokens is None else answer_tokens
    if not 0 < sampled <= response:
        raise ConfigError(
            f"--answer-tokens {sampled}: use at least 1 and at most --context - --prompt-tokens = {response}"
        )
    return {
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": prompt_tokens},
        "agent": {"max_response_tokens": response},
        "buffer": {"groups_per_step": groups},
        "rollout": {
            "backend": "sglang",
            "group_size": group_size,
            "weights": {"transport": "distributed"},
        },
        "simulation": {
            "gpu": gpu,
            "steps": 4,
            "prompt_tokens": {"mean": prompt_tokens / 2},
            "turn_tokens": {"kind": "lognormal", "mean": sampled, "sigma": _SIGMA},
        },
    }


def _base(values: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Return the config of these values, checked, with overrides."""
    from agentrl.config.compose import dump_values, load_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.yaml")
        file.write_text(dump_values(values), encoding="utf-8")
        try:
            return load_config(str(file), overrides)
        except ConfigError as error:  # nobody can look into this file
            place = re.compile(rf" \({re.escape(str(file))}(:\d+)?\)")
            raise ConfigError(place.sub("", str(error))) from None


def _refuse_overruled(overrides: Sequence[str], base: Config, planned: Config) -> None:
    """Raise ConfigError if a plan has another value of a key than an override gave it."""
    wanted, decided = base.model_dump(mode="json"), planned.model_dump(mode="json")
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        asked, got = _value(wanted, key), _value(decided, key)
        if not _is_kept(asked, got):
            also = "; use --max-staleness" if key == "buffer.max_staleness" else ""
            raise ConfigError(f"{override}: a plan decides {key} itself, here {got}; leave it out{also}")


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _is_kept(asked: Any, got: Any) -> bool:
    """Return whether `got` has everything of `asked`; a plan may add arguments of servers."""
    if isinstance(asked, Mapping) and isinstance(got, Mapping):
        return all(_is_kept(value, got.get(name)) for name, value in asked.items())
    return bool(asked == got)
