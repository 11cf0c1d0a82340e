"""Config of generation: servers, sampling, concurrency, and weight updates of the servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from agentrl.config.named_fields import NameIn
from agentrl.config.section import Section
from agentrl.config.server_urls import refuse_url
from agentrl.config.transports import GROUP as TRANSPORTS
from agentrl.config.transports import TransportKind, transport_named
from agentrl.types import SCORED_OUTCOMES, Outcome

OutcomePolicy = Literal["train", "mask", "retry", "replace", "drop", "shrink"]
FinalPolicy = Literal["train", "mask", "drop", "shrink"]
"""The policies that play no further attempt."""

DEFAULT_OUTCOME_POLICY: dict[Outcome, OutcomePolicy] = {
    Outcome.COMPLETED: "train",
    Outcome.TRUNCATED: "train",
    Outcome.TURN_LIMIT: "train",
    Outcome.TIMEOUT: "retry",
    Outcome.TOOL_ERROR: "retry",
    Outcome.ENVIRONMENT_ERROR: "retry",
    Outcome.MODEL_ERROR: "retry",
    Outcome.REWARD_ERROR: "drop",
    Outcome.ABORTED: "drop",
}


MAX_ADAPTERS = 8
"""LoRA adapters that an embedded server holds at once."""


class EmbeddedServerConfig(Section):
    """The embedded server (transformers' continuous batching): for machines without SGLang."""

    num_blocks: int = Field(512, ge=1, description="Number of blocks of the paged KV cache.")
    page_size: int = Field(32, ge=1, description="Tokens per block.")
    max_batch_tokens: int = Field(512, ge=1, description="Maximum tokens per forward pass.")
    max_requests_per_batch: int = Field(
        128, ge=1, description="Maximum requests per forward pass; further requests wait."
    )
    max_lora_rank: int = Field(256, ge=1, description="Maximum rank of LoRA adapters.")
    threads: int = Field(1, ge=1, description="CPU threads of torch.")
    linear_kernels: Literal["auto", "torch", "onednn"] = Field(
        "auto", description="Library for float32 matrix products on a CPU, as `learner.linear_kernels`."
    )
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: matrix products in 8 bits, on a CPU with VNNI. They take a quarter of the time, "
        "but log-probabilities differ from the learner's (`learner/mismatch_mean`), which "
        "`algorithm.correction` takes care of.",
    )


class SGLangServerConfig(Section):
    """SGLang servers."""

    python: str | None = Field(
        None,
        description="Python executable of an environment in which SGLang is installed; None: the current "
        "one.",
    )
    args: dict[str, Any] = Field({}, description="Additional server arguments, `name: value`.")
    env: dict[str, str] = Field({}, description="Additional environment variables of the servers.")


class WeightsConfig(Section):
    """How new weights reach the servers."""

    transport: Annotated[str, AfterValidator(NameIn("transport", TRANSPORTS))] = Field(
        "disk",
        description="disk: safetensors in a folder that all servers can read; distributed: a torch process "
        "group; tensor: in requests to SGLang servers on this machine.",
    )
    delta: bool = Field(
        False,
        description="With transport=disk: write and read only what an update changed; the learner keeps a "
        "copy of its weights in host memory.",
    )
    adapter: Literal["auto", "merged", "alone"] = Field(
        "auto",
        description="What is sent of a model with `model.lora`: merged, all weights with the adapter merged "
        "into them; alone, only the adapter; auto: alone if transport=disk and all servers load "
        "adapters.",
    )
    folder: str | None = Field(
        None, description="Folder of the disk transport; None: `weights/` of the run directory."
    )
    bucket_bytes: int = Field(
        256 * 2**20, ge=1, description="Size in bytes of a bucket of the distributed transport."
    )
    sources: int = Field(
        1,
        ge=1,
        le=8,
        description="Learner ranks that send buckets with transport=distributed, in turn, each through a "
        "process group of its own. With one per node, the bytes leave through the network of all nodes.",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Process-group backend; auto: nccl on GPU, gloo on CPU."
    )
    pause_mode: Literal["auto", "abort", "retract", "in_place"] = Field(
        "auto",
        description="What happens to running requests during a publish; auto: abort for the embedded server, "
        "retract for SGLang.",
    )
    verify: bool = Field(
        False,
        description="Check after every publish, by checksums or sampled tokens, that the servers have the "
        "learner's weights.",
    )
    timeout_s: float = Field(
        120.0,
        gt=0,
        description="Deadline of one attempt to update a server to a version, beside the time for its bytes: "
        "four times what the last publish needed for as many, 20 s per GB before the first. A server that "
        "still responds gets a second attempt.",
    )

    @property
    def kind(self) -> TransportKind:
        return transport_named(self.transport)

    @model_validator(mode="after")
    def _check_sources(self) -> WeightsConfig:
        if self.sources > 1 and not self.kind.has_sources:
            raise ValueError(
                f"sources={self.sources}, transport={self.transport}: only transport=distributed sends from "
                "several ranks; use transport=distributed, or sources=1"
            )
        return self

    @model_validator(mode="after")
    def _check_delta(self) -> WeightsConfig:
        if self.delta and not self.kind.sends_changes:
            raise ValueError(
                f"delta=true, transport={self.transport}: only transport=disk sends deltas; use "
                "transport=disk, or delta=false"
            )
        return self


class RolloutConfig(Section):
    """Generation: servers, sampling, concurrency."""

    backend: Annotated[str, AfterValidator(NameIn("kind of servers", "agentrl.servers"))] = Field(
        "embedded", description="Kind of the servers to start; the kind of the servers at `urls` is detected."
    )
    urls: tuple[str, ...] = Field((), description="URLs of running servers to attach to.")
    front_url: str | None = Field(
        None,
        description="URL of a running SGLang router without workers: agents generate through it, and the "
        "run's servers become its workers.",
    )
    api_key_env: str | None = Field(
        None,
        description="Name of the environment variable with the servers' API key (never the key itself); "
        "required to attach to servers on other machines; null: servers that the run starts get "
        "a random key.",
    )
    num_servers: int | None = Field(
        None,
        ge=0,
        description="Number of servers to start, in addition to those at `urls`; null: 1, or 0 with `urls`.",
    )
    num_actors: int = Field(1, ge=1, description="Number of rollout actors (processes that run agent loops).")
    group_size: int = Field(8, ge=1, description="Attempts per task (GRPO's group size).")
    greedy_baseline: Literal["auto", "always"] = Field(
        "auto",
        description="One more attempt per task, at temperature 0: its reward is a baseline and its tokens "
        "are not trained on. auto: for algorithm.advantage=remax; always: also for your own "
        "estimator.",
    )
    max_concurrent_trajectories: int = Field(
        256, ge=1, description="Maximum trajectories in flight per rollout actor."
    )
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature; the learner divides its logits by the same value."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Must be 1 in training: the learner does not know which tokens sampling kept.",
    )
    top_k: int = Field(-1, description="Must be -1 in training.")
    min_p: float = Field(0.0, ge=0, le=1, description="Must be 0 in training.")
    replay_experts: bool = Field(
        False,
        description="Mixtures of experts: servers record which experts computed each token, and the learner "
        "uses the same ones (router replay), so that rounding does not send a token elsewhere.",
    )
    on_outcome: dict[Outcome, OutcomePolicy] = Field(
        DEFAULT_OUTCOME_POLICY,
        description="What to do with an attempt, by its outcome. train: train on it; mask: keep its reward "
        "in the baseline, but do not train on its tokens (a failed attempt has no reward and is "
        "left out of both); retry, replace: play another attempt; drop: drop its group; shrink: "
        "remove it from its group. docs/agents.md has the table.",
    )
    max_retries: int = Field(
        2, ge=0, description="Immediate retries of one member; then `on_exhausted` applies."
    )
    max_replacements: int = Field(
        5,
        ge=0,
        description="Replacements of one member, in addition to its retries, with exponential backoff; then "
        "`on_exhausted` applies.",
    )
    replacement_pause_s: float = Field(
        1.0,
        ge=0,
        description="Pause before the first replacement of a member; it doubles with each replacement, up to "
        "a minute.",
    )
    on_exhausted: Literal["drop", "shrink"] = Field(
        "drop",
        description="What to do when a member's retries or replacements are used up: drop its group, or "
        "shrink it.",
    )
    min_group_size: int = Field(
        2,
        ge=1,
        description="Minimum number of members with a reward to which a group may shrink, not counting the "
        "greedy attempt; a group that would be smaller is dropped.",
    )
    max_failed_share: float | None = Field(
        0.9,
        gt=0,
        le=1,
        description="The run ends if at least this share of the latest attempts failed, of all or of those "
        "that used one plugin, measured over at least 64 attempts and a tenth of "
        "`buffer.stall_timeout_s`; for a plugin that has never worked, over 16 attempts. model_error and "
        "outcomes with `replace` do not count. None: the run never ends for this reason.",
    )
    colocated: bool = Field(
        False,
        description="Servers share the learner's GPUs: while it trains, they are paused and release their "
        "memory.",
    )
    server_start_timeout_s: float = Field(180.0, gt=0, description="Deadline for a server to become ready.")
    server_hang_timeout_s: float = Field(
        120.0,
        gt=0,
        description="A server that sends nothing for this long, and is not paused, is killed and restarted.",
    )
    max_server_silence_s: float = Field(
        60.0,
        gt=0,
        description="A server hangs if it answers no generation for this long, its load does not change and "
        "it is not paused; its trajectories continue on other servers. A pause longer than "
        "`weights.timeout_s` does not count as a pause.",
    )
    max_server_restarts: int = Field(3, ge=0, description="Maximum restarts per server before the run ends.")
    max_actor_restarts: int = Field(
        3, ge=0, description="Maximum restarts per rollout actor before the run ends."
    )
    embedded: EmbeddedServerConfig = EmbeddedServerConfig()
    sglang: SGLangServerConfig = SGLangServerConfig()
    weights: WeightsConfig = WeightsConfig()

    # Only `eval` may choose these. An attempt to learn from ends where the policy ends it, or at the limits
    # of `agent`.
    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    @property
    def ignore_eos(self) -> bool:
        return False

    @property
    def max_response_tokens(self) -> int | None:
        return None

    @property
    def max_turn_tokens(self) -> int | None:
        return None

    def final_policy(self, outcome: Outcome) -> FinalPolicy:
        """Return the policy for a member's last attempt, after all retries and replacements."""
        policy = self.on_outcome[outcome]
        return self.on_exhausted if policy == "retry" or policy == "replace" else policy

    @property
    def shrinking_key(self) -> str | None:
        """The setting by which a complete group may have fewer members with a reward.

        None: no group may shrink.
        """
        for outcome in Outcome:
            policy = self.on_outcome[outcome]
            if policy == "shrink" or (policy == "mask" and outcome not in SCORED_OUTCOMES):
                return f"on_outcome.{outcome.value}={policy}"
        may_exhaust = any(policy in ("retry", "replace") for policy in self.on_outcome.values())
        return "on_exhausted=shrink" if may_exhaust and self.on_exhausted == "shrink" else None

    @property
    def fixed_group_size(self) -> int | None:
        """Members with a reward in every complete group.

        None if groups may shrink, down to `min_group_size`.
        """
        return self.group_size if self.shrinking_key is None else None

    @property
    def masked_outcomes(self) -> frozenset[Outcome]:
        """The outcomes whose tokens are not trained on."""
        return frozenset(outcome for outcome, policy in self.on_outcome.items() if policy == "mask")

    @property
    def num_started(self) -> int:
        """`num_servers` with None resolved."""
        if self.num_servers is not None:
            return self.num_servers
        return 0 if self.urls else 1

    def pause_mode_of(self, kind: str) -> Literal["abort", "retract", "in_place"]:
        """Return `weights.pause_mode` with auto resolved, for a kind of server.

        It is always abort for the embedded server, which supports nothing else, and for colocated servers:
        they release their memory, so no request can be held.
        """
        if kind == "embedded" or self.colocated:
            return "abort"
        return "retract" if self.weights.pause_mode == "auto" else self.weights.pause_mode

    @model_validator(mode="after")
    def _complete_and_check(self) -> RolloutConfig:
        if (self.top_p, self.top_k, self.min_p) != (1.0, -1, 0.0):
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p}: truncated sampling "
                "is not allowed in training, because servers report log-probabilities of the "
                "full distribution, so that the ratio would be wrong by the probability mass "
                "that was cut; use top_p=1, top_k=-1, min_p=0 (section `eval` may truncate)"
            )
        object.__setattr__(self, "on_outcome", {**DEFAULT_OUTCOME_POLICY, **self.on_outcome})
        self._check_outcomes()
        self._check_servers()
        return self

    def _check_outcomes(self) -> None:
        failed = [
            o.value for o, policy in self.on_outcome.items() if policy == "train" and o not in SCORED_OUTCOMES
        ]
        if failed:
            raise ValueError(
                f"on_outcome.{failed[0]}=train: a failed attempt has no reward to learn from; use retry or "
                "drop"
            )
        if all(policy != "train" for policy in self.on_outcome.values()):
            raise ValueError(
                "on_outcome trains on no outcome, so nothing would be learned; use on_outcome.completed=train"
            )
        key = self.shrinking_key
        if key is not None and self.min_group_size > self.group_size:
            raise ValueError(
                f"{key} keeps at least min_group_size={self.min_group_size} members of a group, "
                f"but group_size={self.group_size} is smaller; use a smaller min_group_size, or "
                "drop"
            )

    def _check_servers(self) -> None:
        if not self.num_started and not self.urls:
            raise ValueError(
                "num_servers=0 starts no server, and urls is empty; set urls, or start at least one server"
            )
        if (
            self.num_started
            and self.backend == "embedded"
            and self.weights.pause_mode not in ("auto", "abort")
        ):
            raise ValueError(
                f"weights.pause_mode={self.weights.pause_mode}: the embedded server "
                "(backend=embedded) supports only abort; use auto or abort"
            )
        if self.colocated and self.weights.pause_mode not in ("auto", "abort"):
            raise ValueError(
                f"weights.pause_mode={self.weights.pause_mode}: with colocated=true, servers "
                "release their memory and cannot keep requests; use auto or abort"
            )
        if self.num_started and (why := self.weights.kind.refused_by.get(self.backend)) is not None:
            raise ValueError(f"weights.transport={self.weights.transport}: {why}; use disk or distributed")
        for url in self.urls:
            if why := refuse_url(url, has_key=self.api_key_env is not None):
                raise ValueError(f"rollout.urls: {why}")
        if self.front_url is not None and (
            why := refuse_url(self.front_url, has_key=self.api_key_env is not None)
        ):
            raise ValueError(f"front_url: {why}")
