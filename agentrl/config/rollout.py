"""Config of generation: servers, sampling, concurrency, and weight updates of the servers."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from agentrl.config.section import Section
from agentrl.loopback import is_local
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
    Outcome.MODEL_ERROR: "retry",
    Outcome.REWARD_ERROR: "drop",
    Outcome.ABORTED: "drop",
}


class EmbeddedServerConfig(Section):
    """The embedded server (transformers' continuous batching): for machines without SGLang."""

    num_blocks: int = Field(512, ge=1, description="Blocks of the paged KV cache.")
    page_size: int = Field(32, ge=1, description="Tokens per block.")
    max_batch_tokens: int = Field(512, ge=1, description="Tokens per forward.")
    max_requests_per_batch: int = Field(128, ge=1, description="Requests per forward; more wait.")
    max_lora_rank: int = Field(256, ge=1, description="LoRA adapters of a higher rank are refused.")
    threads: int = Field(1, ge=1, description="CPU threads of torch.")


class SGLangServerConfig(Section):
    """SGLang servers."""

    python: str | None = Field(None, description="Python of an environment in which SGLang is installed; None: this one's.")
    args: dict[str, Any] = Field({}, description="Further server arguments, `name: value`.")
    env: dict[str, str] = Field({}, description="Variables added to the servers' environment.")


class WeightsConfig(Section):
    """How new weights reach the servers."""

    transport: Literal["disk", "distributed", "tensor"] = Field(
        "disk",
        description="disk: safetensors in a folder all can read; distributed: torch process group; "
        "tensor: in requests to SGLang servers on this machine.",
    )
    delta: bool = Field(
        False,
        description="With transport disk: write and read only what an update changed; the learner keeps a copy of its weights on the host.",
    )
    adapter: Literal["auto", "merged", "alone"] = Field(
        "auto",
        description="What is sent of a model with `model.lora`: all weights with the adapter merged into them, or the adapter alone; "
        "auto: alone where transport is disk and all servers load adapters.",
    )
    folder: str | None = Field(None, description="Folder of the disk transport; None: `weights/` of the run directory.")
    bucket_bytes: int = Field(256 * 2**20, ge=1, description="Bytes sent at once by the distributed transport.")
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="Process-group backend; auto: nccl on GPU, gloo on CPU.")
    pause_mode: Literal["auto", "abort", "retract", "in_place"] = Field(
        "auto", description="What happens to running requests; auto: abort for the embedded server, retract for SGLang."
    )
    verify: bool = Field(
        False, description="Check after every publish, by checksums or sampled tokens, that servers have the learner's weights."
    )
    timeout_s: float = Field(
        120.0, gt=0, description="Deadline of one attempt to bring a server to a version; one that answers still gets a second."
    )

    @model_validator(mode="after")
    def _check_delta(self) -> WeightsConfig:
        if self.delta and self.transport != "disk":
            raise ValueError(f"delta=true, transport={self.transport}: only the transport disk sends deltas; use disk, or delta=false")
        return self


class RolloutConfig(Section):
    """Generation: servers, sampling, concurrency."""

    backend: Literal["embedded", "sglang"] = Field("embedded", description="Which kind of server to start; those at `urls` are asked.")
    urls: tuple[str, ...] = Field((), description="Attach to these running servers.")
    front_url: str | None = Field(
        None,
        description="SGLang's router, already running without workers: agents generate through it; the run's servers become its workers.",
    )
    api_key_env: str | None = Field(
        None,
        description="Environment variable with the key of the servers, never the key itself; needed to attach to other machines; null: "
        "servers that a run starts get a random one.",
    )
    num_servers: int | None = Field(None, ge=0, description="Servers to start, beside those at `urls`; null: 1, or none with `urls`.")
    num_actors: int = Field(1, ge=1, description="Rollout actors (processes that run agent loops).")
    group_size: int = Field(8, ge=1, description="Trajectories per task (GRPO's n).")
    greedy_baseline: Literal["auto", "always"] = Field(
        "auto",
        description="One more attempt per task at temperature 0, whose reward is a baseline and whose tokens nobody learns from; "
        "auto: for algorithm.advantage=remax; always: also for an estimator of your own.",
    )
    max_concurrent_trajectories: int = Field(256, ge=1, description="Trajectories in flight per rollout actor.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the learner divides its logits by it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must stay 1 in training: the kept set is unknown to the learner.")
    top_k: int = Field(-1, description="Must stay -1 in training.")
    min_p: float = Field(0.0, ge=0, le=1, description="Must stay 0 in training.")
    on_outcome: dict[Outcome, OutcomePolicy] = Field(
        DEFAULT_OUTCOME_POLICY,
        description="What becomes of an attempt, by its outcome: train on it; mask: keep its reward in the baseline and learn nothing from "
        "its tokens (a failed one has no reward, and counts in neither); retry or replace it by another attempt; drop its group; shrink "
        "the group to the others. docs/agents.md has the table.",
    )
    max_retries: int = Field(2, ge=0, description="Retries of one member, each at once; then `on_exhausted`.")
    max_replacements: int = Field(
        5, ge=0, description="Replacements of one member, beside its retries, each after a pause twice as long; then `on_exhausted`."
    )
    replacement_pause_s: float = Field(1.0, ge=0, description="Pause before the first replacement of a member; none exceeds a minute.")
    on_exhausted: Literal["drop", "shrink"] = Field(
        "drop", description="What becomes of a member whose retries or replacements are used up: drop its group, or shrink it."
    )
    min_group_size: int = Field(
        2,
        ge=1,
        description="A group shrinks to this many members with a reward, the greedy one not counted; one that would be smaller is dropped.",
    )
    max_failed_share: float | None = Field(
        0.9,
        gt=0,
        le=1,
        description="The run ends when at least this share of the latest attempts failed: of 64 at least, over a tenth of "
        "`buffer.stall_timeout_s` at least; model_error and outcomes to `replace` do not count. None: it goes on.",
    )
    colocated: bool = Field(
        False, description="Servers stand on the learner's GPUs: while it learns they are paused and give their memory back."
    )
    server_start_timeout_s: float = Field(180.0, gt=0, description="A server that is not ready by then failed.")
    server_hang_timeout_s: float = Field(
        120.0, gt=0, description="A server from which nothing comes for so long, though it is not paused, is killed and started anew."
    )
    max_server_silence_s: float = Field(
        60.0,
        gt=0,
        description="A server that answers no generation for so long, whose load stands still and that is not paused, hangs: its "
        "trajectories go on elsewhere. A pause longer than `weights.timeout_s` is none.",
    )
    max_server_restarts: int = Field(3, ge=0, description="Restarts per server before the run ends.")
    max_actor_restarts: int = Field(3, ge=0, description="Restarts per rollout actor before the run ends.")
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

    def pause_mode_of(self, kind: Literal["embedded", "sglang"]) -> Literal["abort", "retract", "in_place"]:
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
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p}: truncated sampling is refused in training because the "
                "servers report log-probabilities of the full distribution and the ratio would be off by the kept mass; "
                "use top_p=1, top_k=-1, min_p=0 (the `eval` group may truncate)"
            )
        object.__setattr__(self, "on_outcome", {**DEFAULT_OUTCOME_POLICY, **self.on_outcome})
        self._check_outcomes()
        self._check_servers()
        return self

    def _check_outcomes(self) -> None:
        failed = [o.value for o, policy in self.on_outcome.items() if policy == "train" and o not in SCORED_OUTCOMES]
        if failed:
            raise ValueError(f"on_outcome.{failed[0]}=train: an attempt that failed has no reward to learn from; use retry or drop")
        if all(policy != "train" for policy in self.on_outcome.values()):
            raise ValueError("on_outcome trains on no outcome: nothing would ever be learned; use on_outcome.completed=train")
        key = self.shrinking_key
        if key is not None and self.min_group_size > self.group_size:
            raise ValueError(
                f"{key} leaves a group min_group_size={self.min_group_size} members or more, but group_size={self.group_size} is less; "
                "use a smaller min_group_size, or drop"
            )

    def _check_servers(self) -> None:
        if not self.num_started and not self.urls:
            raise ValueError("num_servers=0 starts no server, and urls names none to attach to; name some, or start some")
        if self.num_started and self.backend == "embedded" and self.weights.pause_mode not in ("auto", "abort"):
            raise ValueError(
                f"weights.pause_mode={self.weights.pause_mode}: the embedded server (backend=embedded) knows abort only; use auto or abort"
            )
        if self.colocated and self.weights.pause_mode not in ("auto", "abort"):
            raise ValueError(
                f"weights.pause_mode={self.weights.pause_mode}: with colocated=true no request outlives the memory that is given back; "
                "use auto or abort"
            )
        if self.num_started and self.backend == "embedded" and self.weights.transport == "tensor":
            raise ValueError("weights.transport=tensor: the embedded server (backend=embedded) unpickles nothing; use disk or distributed")
        for url in self.urls:
            if why := refuse_url(url, has_key=self.api_key_env is not None):
                raise ValueError(f"urls: {why}")
        if self.front_url is not None and (why := refuse_url(self.front_url, has_key=self.api_key_env is not None)):
            raise ValueError(f"front_url: {why}")


def refuse_url(url: str, *, has_key: bool) -> str | None:
    """Return in one line why a server at `url` must not be attached to; None if it may be."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{url!r} is no URL of a server; write http://HOST:PORT"
    if has_key or is_local(parts.hostname):
        return None
    return f"{url} is on another machine, and whoever reaches it may change the policy; name its key by rollout.api_key_env"
