"""Config of rewards: the reward of each row, and further terms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section

REWARD_PRESETS: dict[str, str] = {
    "arithmetic": "arithmetic",
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_500": "math",
    "math": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
    "numina_*": "math",
    "aime*": "aime",
    "AIME*": "aime",
    "*/aime*": "aime",
    "*/AIME*": "aime",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_*": "exact_match",
    "reasoning_gym/*": "reasoning_gym",
    "gymnasium/*": "gymnasium",
    "openenv/*": "openenv",
    "verifiers/*": "verifiers",
    "textarena/*": "textarena",
    "tau2/*": "tau2",
}


class CustomFunctionConfig(Section):
    """Your own `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

    path: str | None = Field(None, description="Python file; None: rewards are chosen by `reward.sources`.")
    name: str = Field("compute_score", description="Function in that file; sync or async.")
    kwargs: dict[str, Any] = Field({}, description="Additional keyword arguments of the function.")
    scope: Literal["trajectory", "batch"] = Field(
        "trajectory",
        description="trajectory: called per attempt; batch: once per batch, as "
        "`f(data_sources, solution_strs, ground_truths, extra_infos)`.",
    )
    runs_in: Literal["thread", "process", "inline"] = Field(
        "thread",
        description="Where a sync function runs: in a thread, in a process that is killed at the deadline, "
        "or in the event loop (only if it takes microseconds).",
    )


class RewardTermConfig(Section):
    """One more term of the reward."""

    reward: str | None = Field(None, description="Registered reward; None: the term's own name.")
    weight: float = Field(1.0, description="Its weight in the sum; 0: only reported.")
    sources: tuple[str, ...] = Field(
        (), description="Data sources to which it applies; `*` matches any text; (): all."
    )
    config: dict[str, Any] = Field(
        {}, description="Its `config` dictionary, which overrides that of reward.reward_config."
    )
    timeout_s: float | None = Field(None, gt=0, description="Its deadline; None: reward.timeout_s.")


class RewardConfig(Section):
    """Which reward scores which row: one by the row's data source (or your function), and any number of named
    terms beside it.
    """

    sources: dict[str, str] = Field(
        REWARD_PRESETS,
        description="data_source -> registered reward; your entries are added to the presets. `*` in a data "
        "source matches any text; an exact name takes precedence over a pattern, and a longer "
        "pattern over a shorter one.",
    )
    custom_function: CustomFunctionConfig = CustomFunctionConfig()
    solution_str: Literal["decoded", "messages"] = Field(
        "decoded",
        description="What functions with verl's signature, `remote` and `agentrl generate` get as the text. "
        "decoded: the tokens of the response, decoded as verl does, with calls and tool answers as the "
        "template wrote them, without special tokens; messages: the content of the messages, without calls.",
    )
    reward_config: dict[str, dict[str, Any]] = Field(
        {}, description="Reward name -> its `config` dictionary."
    )
    weight: float = Field(
        1.0, description="Weight of the row's own reward (by `sources` or `custom_function`) in the sum."
    )
    terms: dict[str, RewardTermConfig] = Field(
        {}, description="Name -> additional term, such as length_penalty, format, llm_judge."
    )
    assignment: Literal["outcome", "turn"] = Field(
        "turn",
        description="turn: each reward is placed on the last action token of the turn that earned it, and a "
        "reward of the whole attempt on its last action token; outcome: all rewards are placed "
        "on the last action token of the attempt.",
    )
    num_processes: int = Field(
        1, ge=1, description="Processes per rollout actor for rewards that run in a separate process."
    )
    num_examine: int = Field(
        0,
        ge=0,
        description="Number of scored attempts printed in full at each validation, first one of each data "
        "source.",
    )
    timeout_s: float = Field(30.0, gt=0, description="Deadline of one call of a reward.")
    tool_reward_weight: float = Field(
        0.0, description="Weight of the rewards that tools give per turn; 0: only reported."
    )
    interaction_reward_weight: float = Field(
        0.0,
        description="Weight of the rewards that interactions give per turn and at the end; 0: only reported.",
    )

    @model_validator(mode="after")
    def _keep_presets(self) -> RewardConfig:
        object.__setattr__(self, "sources", {**type(self).model_fields["sources"].default, **self.sources})
        return self
