"""Config of sampling in validation and evaluations."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Section


class EvalConfig(Section):
    """Sampling of validation and of evaluations."""

    n: int = Field(1, ge=1, description="Attempts per row.")
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, description="-1: off.")
    min_p: float = Field(0.0, ge=0, le=1, description="0: off.")
    stop: tuple[str, ...] = Field(
        (), description="Stop strings: a turn ends with the token that completes one of them, which is kept."
    )
    ignore_eos: bool = Field(
        False,
        description="Ignore the end-of-sequence token, so that only a limit ends a turn: for speed "
        "measurements.",
    )
    max_response_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens per attempt; None: agent.max_response_tokens."
    )
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens sampled per turn; None: agent.max_turn_tokens."
    )
    templates: dict[str, str] = Field(
        {},
        description="For `agentrl eval` and `agentrl generate`: dataset (`*`: any other) -> template around "
        "its questions, by name and version (docs/evaluation.md); none: the rows' prompts are "
        "used unchanged.",
    )
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Deadline of one whole validation; attempts still running then are counted as failed.",
    )
    watchdog_s: float | None = Field(
        300.0,
        gt=0,
        description="For `agentrl eval` and `agentrl generate`: seconds without a finished attempt after "
        "which they report what they wait for, also in watchdog/ of the results folder; choose "
        "more than the slowest attempt takes. None: never.",
    )
    rewards: dict[str, str] = Field(
        {},
        description="data_source (or a pattern with `*`) -> the reward of such rows in validation; other "
        "rows keep the reward of `reward.sources`. If there is any entry, "
        "`reward.custom_function` is not used in validation.",
    )
    tools: tuple[str, ...] | None = Field(
        None, description="Tools of validation, instead of `agent.tools`; null: the same."
    )

    @property
    def replay_experts(self) -> bool:
        return False  # nothing is learned from these attempts
