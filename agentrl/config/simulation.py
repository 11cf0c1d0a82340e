"""Config of the simulator: what a run's config does not say about its hardware and its tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from agentrl.config.section import Section

_MOST = 1e12
_LEAST = 1e-6
_LEAST_H = 1e-3
"""Least shares and hours: below, times would overflow, and failures would never end."""


class _Finite(Section):
    """A section without infinite numbers, which no simulation could wait for."""

    model_config = ConfigDict(allow_inf_nan=False)


class DistributionConfig(_Finite):
    """A distribution of numbers."""

    kind: Literal["fixed", "lognormal", "exponential", "uniform", "samples"] = Field(
        "fixed", description="uniform: from 0 to twice the mean; samples: one of `values`, each as likely."
    )
    mean: float = Field(0.0, ge=0, le=_MOST, description="Mean; not used by samples.")
    sigma: float = Field(1.0, ge=0, le=5, description="With lognormal: standard deviation of the logarithm.")
    most: float | None = Field(None, gt=0, description="Larger numbers are cut to this; None: never.")
    group_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="With lognormal and samples: part of the variance that all attempts at a task have in "
        "common. With samples, of the variance of their normal scores.",
    )
    values: tuple[float, ...] = Field((), description="With samples: the numbers to draw from.")

    @model_validator(mode="after")
    def _check(self) -> DistributionConfig:
        if (self.kind == "samples") != bool(self.values):
            raise ValueError(
                f"kind={self.kind} with {len(self.values)} values: only samples has values, at least one"
            )
        return self


def _lognormal(mean: float, sigma: float) -> DistributionConfig:
    return DistributionConfig(kind="lognormal", mean=mean, sigma=sigma)


class SimulatedServerConfig(_Finite):
    """Speed of a simulated server."""

    gpus: int = Field(1, ge=1, le=1024, description="GPUs of one server (tensor parallelism).")
    bandwidth_share: float = Field(
        0.6, ge=_LEAST, le=1, description="Share of the GPUs' memory bandwidth that decoding reaches."
    )
    compute_share: float = Field(
        0.5,
        ge=_LEAST,
        le=1,
        description="Share of the GPUs' peak that prefill and large batches reach.",
    )
    tick_s: float = Field(
        0.004,
        ge=0,
        le=_MOST,
        description="Seconds that each decoding step takes beside reading and computing.",
    )
    max_running: int = Field(256, ge=1, description="Requests that decode at the same time.")
    memory_share: float = Field(
        0.85, ge=_LEAST, le=1, description="Share of the GPUs' memory for weights and KV cache."
    )
    seconds_per_token: float | None = Field(
        None,
        ge=_LEAST,
        le=_MOST,
        description="Seconds of a token of each request; prefill is free then. None: computed from the model "
        "and the GPU.",
    )
    seconds_per_running: float = Field(
        0.0,
        ge=0,
        le=_MOST,
        description="With seconds_per_token: seconds that each running request adds to it.",
    )

    @model_validator(mode="after")
    def _check(self) -> SimulatedServerConfig:
        if self.seconds_per_running and self.seconds_per_token is None:
            raise ValueError(
                f"seconds_per_running={self.seconds_per_running:g} adds to seconds_per_token: set that too"
            )
        return self


class SimulatedLearnerConfig(_Finite):
    """Speed of the simulated learner."""

    mfu: float = Field(
        0.35, ge=_LEAST, le=1, description="Share of the GPUs' peak that updates and scoring reach."
    )
    driver_us_per_token: float = Field(
        0.05,
        ge=0,
        description="Microseconds per token in which the driver takes, credits and packs.",
    )
    tokens_per_s: float | None = Field(
        None,
        gt=0,
        description="Sampled tokens per second of all ranks. None: computed from the model and the GPU.",
    )


class SimulationConfig(_Finite):
    """What `agentrl simulate` assumes. A training does not read it."""

    gpu: Literal["a100", "h20", "h100", "h200", "b200"] = Field("h100", description="The GPUs of all nodes.")
    gpus_per_node: int = Field(8, ge=1, le=1024, description="GPUs of a node.")
    model: str | None = Field(
        None,
        description="Size of the policy, by a name such as qwen3-8b. None: the config.json in model.path.",
    )
    steps: int = Field(12, ge=1, description="Measured steps.")
    warmup: int | None = Field(
        None, ge=0, description="Steps before. None: buffer.max_staleness + 2, until the pipeline is full."
    )
    grain_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that one simulated token stands for: larger is faster and less exact. None: a "
        "hundredth of the mean attempt.",
    )
    prompt_tokens: DistributionConfig = Field(
        DistributionConfig(mean=512.0), description="Tokens of a task's first prompt."
    )
    turns: DistributionConfig = Field(
        DistributionConfig(mean=1.0), description="Turns of an attempt, each but the last with a tool call."
    )
    turn_tokens: DistributionConfig = Field(
        _lognormal(2000.0, 1.0), description="Tokens that the policy samples in a turn."
    )
    tool_tokens: DistributionConfig = Field(
        DistributionConfig(mean=200.0), description="Tokens of a tool's output."
    )
    tool_s: DistributionConfig = Field(
        DistributionConfig(kind="exponential", mean=2.0), description="Seconds of a tool call."
    )
    tool_hang: float = Field(
        0.0, ge=0, le=1, description="Share of tool calls that take the whole agent.tool_timeout_s."
    )
    tool_failure: float = Field(0.0, ge=0, le=1, description="Share of tool calls that end their attempt.")
    pass_rate: float = Field(0.5, ge=0, le=1, description="Share of attempts with reward 1; others have 0.")
    network_gb_s: float = Field(
        40.0, gt=0, description="GB per second into each server in a publish by process group."
    )
    disk_gb_s: float = Field(
        2.0, gt=0, description="GB per second from and to the shared folder, of all nodes together."
    )
    publish_s: float = Field(0.2, ge=0, description="Seconds of a publish beside its bytes.")
    server_mtbf_h: float | None = Field(
        None, ge=_LEAST_H, le=_MOST, description="Mean hours until a server dies. None: never."
    )
    actor_mtbf_h: float | None = Field(
        None, ge=_LEAST_H, le=_MOST, description="Mean hours until a rollout actor dies. None: never."
    )
    restart_s: float = Field(120.0, gt=0, description="Seconds in which a server or a rank starts again.")
    server: SimulatedServerConfig = SimulatedServerConfig()
    learner: SimulatedLearnerConfig = SimulatedLearnerConfig()

    @model_validator(mode="after")
    def _check(self) -> SimulationConfig:
        if self.tool_hang + self.tool_failure > 1:
            raise ValueError(
                f"tool_hang={self.tool_hang:g} and tool_failure={self.tool_failure:g} are shares of the same "
                "calls; their sum must be at most 1"
            )
        return self
