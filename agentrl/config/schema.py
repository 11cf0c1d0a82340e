"""The schema of a run: the only place of defaults. A component receives its own part of it, never the whole.

Units are suffixes (`_s` seconds, `_tokens`, `_bytes`). `docs/config.md` is generated from this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.placement import PlacementConfig, Role
from agentrl.config.profiler import ProfilerConfig
from agentrl.config.section import Section
from agentrl.types import SCORED_OUTCOMES, Outcome

# ----------------------------------------------------------------------------------------------------------- data


class DataConfig(Section):
    """Where tasks come from."""

    train_files: tuple[str, ...] = Field((), description="Parquet or JSON-lines files to train on, in this order before shuffling.")
    val_files: tuple[str, ...] = Field((), description="Files to validate on, always whole and in order.")
    shuffle: bool = Field(True, description="Shuffle the training rows anew for each epoch, by `trainer.seed`.")
    max_prompt_tokens: int = Field(512, ge=1, description="Longest prompt, tool schemas included.")
    overlong_prompts: Literal["filter", "truncate_left", "truncate_right", "truncate_middle", "error"] = Field(
        "filter", description="What happens to a longer prompt; filtered and truncated rows are counted."
    )
    max_train_rows: int | None = Field(None, ge=1, description="Use only the first N rows; None: all.")
    max_val_rows: int | None = Field(None, ge=1, description="Use only the first N rows; None: all.")
    reader: str | None = Field(
        None, description="`module:function` or `file.py:function` that turns one row (a dict) into a Task; None: the columns below."
    )
    data_source_key: str = Field("data_source", description="Column that chooses the reward.")
    prompt_key: str = Field("prompt", description="Column of the chat messages.")
    ability_key: str = Field("ability", description="Column of the ability label.")
    reward_model_key: str = Field("reward_model", description="Column of {style, ground_truth}.")
    extra_info_key: str = Field("extra_info", description="Column of {tools_kwargs, interaction_kwargs, ...}.")
    agent_name_key: str = Field("agent_name", description="Column that chooses the agent; may be absent.")


# ---------------------------------------------------------------------------------------------------------- model


class LoRAConfig(Section):
    """A trained low-rank adapter beside frozen weights; servers get the sum of both."""

    rank: int = Field(0, ge=0, description="Rank of the adapter; 0: no adapter, all weights are trained.")
    alpha: float = Field(32.0, gt=0, description="The adapter's share is scaled by alpha / rank.")
    target_modules: tuple[str, ...] = Field((), description="Names of the linear layers that get one; (): all but the output head.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapter, in updates only.")


class ModelConfig(Section):
    """The policy and its tokenizer."""

    path: str = Field("", description="Local folder or hub id of the policy.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id; None: its main branch.")
    tokenizer_path: str | None = Field(None, description="Folder of the tokenizer; None: `model.path`.")
    chat_template: str | None = Field(None, description="Jinja file that replaces the tokenizer's own template; None: the tokenizer's.")
    tool_format: Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "gpt_oss", "pythonic"] = Field(
        "auto", description="How the model writes tool calls; auto: from the chat template; none: it writes no calls."
    )
    template_edits: Literal["fork", "refuse"] = Field(
        "fork",
        description="When the chat template edits earlier turns (drops their thinking): fork starts a new training row with the edited "
        "history, refuse ends the run before it starts.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Parameter dtype of learner and servers.")
    attention: Literal["auto", "sdpa", "segment_sdpa", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="Attention of the learner; auto: per-segment SDPA on CPU, flash or flex attention on GPU."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    external_lib: str | None = Field(
        None, description="`package.module` or `file.py` imported before the model is loaded, such as one that registers its class."
    )
    lora: LoRAConfig = LoRAConfig()


# ---------------------------------------------------------------------------------------------------------- agent


class ToolLimits(Section):
    """Limits of one tool."""

    timeout_s: float | None = Field(None, gt=0, description="Deadline of one call; None: agent.tool_timeout_s.")
    max_concurrent: int | None = Field(None, ge=1, description="Calls at once per rollout actor, further ones wait; None: any number.")
    max_retries: int = Field(2, ge=0, description="Further tries of a call whose infrastructure failed, if the tool is idempotent.")
    max_output_tokens: int | None = Field(None, ge=1, description="Longer output is cut; None: agent.max_tool_output_tokens.")
    keep: Literal["head", "tail", "ends"] = Field("ends", description="Which part of too long an output stays; ends: the middle is cut.")
    on_failure: Literal["end", "tell"] = Field(
        "end",
        description="When the tool itself broke: end the trajectory with outcome tool_error, or tell the model that it is not available.",
    )
    breaker_failures: int = Field(
        5, ge=1, description="Failures in a row, over all trajectories of an actor, that open the circuit breaker."
    )
    breaker_pause_s: float = Field(30.0, gt=0, description="How long an open breaker refuses calls before it lets one through.")


class MCPServerConfig(Section):
    """One MCP server: a `command` to start (stdio), or a `url` (streamable HTTP)."""

    command: tuple[str, ...] = Field((), description="Program and arguments of a server that speaks MCP over stdin and stdout.")
    env: dict[str, str] = Field({}, description="Further environment variables of the command.")
    url: str | None = Field(None, description="Address of a server that speaks MCP over streamable HTTP.")
    headers_env: dict[str, str] = Field({}, description="HTTP header -> environment variable that holds its value (tokens, keys).")
    prefix: str | None = Field(None, description="Put before the names of its tools; None: the server's name and an underscore.")
    tools: tuple[str, ...] = Field((), description="Which of its tools are offered, by their own names; (): all.")
    per_trajectory: bool = Field(False, description="A session of its own for each trajectory, for servers that keep state.")
    start_timeout_s: float = Field(30.0, gt=0, description="Deadline of starting it and listing its tools.")

    @model_validator(mode="after")
    def _has_one_address(self) -> MCPServerConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server needs either `command` (stdio) or `url` (streamable HTTP)")
        return self


class AgentConfig(Section):
    """What an agent loop may use and spend."""

    default: str = Field(
        "single_turn_agent", description="Agent of rows that name none and have neither tools_kwargs nor interaction_kwargs."
    )
    plugins: tuple[str, ...] = Field(
        (), description="Your own plugins: `file.py` or `package.module`, each class is registered by its `name`."
    )
    tools: tuple[str, ...] = Field((), description="Tools offered to tool agents; a row's tools_kwargs may add others.")
    tool_config: dict[str, dict[str, Any]] = Field({}, description="Tool name -> its `config` dictionary.")
    tool_limits: dict[str, ToolLimits] = Field({}, description="Tool name -> its limits.")
    mcp_servers: dict[str, MCPServerConfig] = Field({}, description="Name -> MCP server whose tools are offered under a prefix.")
    interaction_config: dict[str, dict[str, Any]] = Field({}, description="Interaction name -> its `config` dictionary.")
    agent_config: dict[str, dict[str, Any]] = Field({}, description="Agent name -> its `config` dictionary.")
    verl_tool_config: str | None = Field(None, description="verl's YAML of tools (`class_name`, `config`, `tool_schema`), as it is.")
    verl_function_tools: str | None = Field(None, description="Python file with verl's function tools (`@function_tool`), as it is.")
    verl_interaction_config: str | None = Field(None, description="verl's YAML of interactions (`name`, `class_name`, `config`), as it is.")
    max_turns: int = Field(8, ge=1, description="Assistant turns per trajectory.")
    max_user_turns: int | None = Field(None, ge=0, description="Answers of the interaction partner per trajectory; None: any number.")
    max_tool_calls_per_turn: int = Field(8, ge=1, description="Calls run per turn; further ones are answered `not run`.")
    max_response_tokens: int = Field(1024, ge=1, description="Tokens per trajectory after the prompt, context included.")
    max_turn_tokens: int | None = Field(None, ge=1, description="Tokens sampled per turn; None: what is left of the response.")
    max_tool_output_tokens: int = Field(512, ge=1, description="Longer tool output is cut in the middle, and says so.")
    trajectory_timeout_s: float = Field(600.0, gt=0, description="Deadline of one attempt, everything included.")
    tool_timeout_s: float = Field(30.0, gt=0, description="Deadline of one tool call.")
    interaction_timeout_s: float = Field(30.0, gt=0, description="Deadline of one reply of an interaction.")


# -------------------------------------------------------------------------------------------------------- rollout

OutcomePolicy = Literal["train", "retry", "drop"]

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
    threads: int = Field(1, ge=1, description="CPU threads of torch.")


class SGLangServerConfig(Section):
    """SGLang servers."""

    python: str | None = Field(None, description="Python of an environment in which SGLang is installed; None: this one's.")
    args: dict[str, Any] = Field({}, description="Further server arguments, `name: value`.")


class WeightsConfig(Section):
    """How new weights reach the servers."""

    transport: Literal["disk", "distributed"] = Field(
        "disk", description="disk: safetensors in a folder all can read; distributed: torch process group."
    )
    folder: str | None = Field(None, description="Folder of the disk transport; None: `weights/` of the run directory.")
    bucket_bytes: int = Field(256 * 2**20, ge=1, description="Bytes sent at once by the distributed transport.")
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="Process-group backend; auto: nccl on GPU, gloo on CPU.")
    pause_mode: Literal["auto", "abort", "retract", "in_place"] = Field(
        "auto", description="What happens to running requests; auto: abort for the embedded server, retract for SGLang."
    )
    verify: bool = Field(False, description="Compare checksums of servers and learner after every publish.")
    timeout_s: float = Field(120.0, gt=0, description="Deadline of one publish.")


class RolloutConfig(Section):
    """Generation: servers, sampling, concurrency."""

    backend: Literal["embedded", "sglang"] = Field("embedded", description="Which server to start, or which kind runs at `urls`.")
    urls: tuple[str, ...] = Field((), description="Attach to these running servers instead of starting any.")
    api_key_env: str | None = Field(None, description="Environment variable with the key of the servers; never the key itself.")
    num_servers: int = Field(1, ge=1, description="Servers to start.")
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
        DEFAULT_OUTCOME_POLICY, description="Per outcome: train on it, retry the member, or drop its group."
    )
    max_retries: int = Field(2, ge=0, description="Retries of one member before its group is dropped.")
    server_start_timeout_s: float = Field(180.0, gt=0, description="A server that is not ready by then failed.")
    max_server_restarts: int = Field(3, ge=0, description="Restarts per server before the run ends.")
    max_actor_restarts: int = Field(3, ge=0, description="Restarts per rollout actor before the run ends.")
    embedded: EmbeddedServerConfig = EmbeddedServerConfig()
    sglang: SGLangServerConfig = SGLangServerConfig()
    weights: WeightsConfig = WeightsConfig()

    @property
    def pause_mode_in_use(self) -> Literal["abort", "retract", "in_place"]:
        """What `weights.pause_mode` comes to: the embedded server knows `abort` only."""
        if self.weights.pause_mode != "auto":
            return self.weights.pause_mode
        return "abort" if self.backend == "embedded" else "retract"

    @model_validator(mode="after")
    def _complete_and_check(self) -> RolloutConfig:
        if (self.top_p, self.top_k, self.min_p) != (1.0, -1, 0.0):
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p}: truncated sampling is refused in training because the "
                "servers report log-probabilities of the full distribution and the ratio would be off by the kept mass; "
                "use top_p=1, top_k=-1, min_p=0 (the `eval` group may truncate)"
            )
        failed = [o.value for o, policy in self.on_outcome.items() if policy == "train" and o not in SCORED_OUTCOMES]
        if failed:
            raise ValueError(f"on_outcome.{failed[0]}=train: an attempt that failed has no reward to learn from; use retry or drop")
        object.__setattr__(self, "on_outcome", {**DEFAULT_OUTCOME_POLICY, **self.on_outcome})
        return self


# --------------------------------------------------------------------------------------------------------- buffer


class BufferConfig(Section):
    """The replay buffer: how much, how old, in which order."""

    groups_per_step: int = Field(16, ge=1, description="Groups (tasks) in one batch.")
    max_staleness: int = Field(1, ge=0, description="No token older than this many versions is trained on; 0: strictly on-policy.")
    sampler: Literal["fifo"] = Field("fifo", description="Order in which ready groups are taken; fifo: oldest lease first.")
    stall_timeout_s: float = Field(600.0, gt=0, description="No finished trajectory for so long ends the run with a report.")
    drop_constant_groups: bool = Field(
        False,
        description="Drop a complete group whose attempts all earned the same, a greedy one included, and lease another in its place "
        "(dynamic sampling).",
    )
    max_constant_batches: int = Field(
        10,
        ge=1,
        description="With drop_constant_groups: so many batches' worth of them dropped while one batch is waited for ends the run.",
    )


# -------------------------------------------------------------------------------------------------------- learner


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay to 0 over the run's updates.")
    warmup_updates: int = Field(0, ge=0, description="Linear warm-up, in optimizer updates.")
    grad_clip: float | None = Field(1.0, gt=0, description="Largest global gradient norm; None: no clipping.")


class FSDPConfig(Section):
    """How the weights are spread over the learner's ranks: memory against communication."""

    shard_size: int | None = Field(
        None,
        ge=1,
        description="Ranks that share one copy of the weights; divides `world_size`. None: all of them; fewer: HSDP, one copy each.",
    )
    reshard_after_forward: bool = Field(
        True, description="Free a layer's gathered weights after its forward and gather them again for its backward; false: keep them."
    )
    forward_prefetch: int = Field(
        0, ge=0, description="Layers whose weights are gathered ahead of their forward; 0: by FSDP's own overlap."
    )


class LearnerConfig(Section):
    """FSDP ranks and the optimizer step."""

    world_size: int = Field(1, ge=1, description="FSDP ranks; each learns from microbatches of its own, unless ranks share them.")
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share each microbatch, a part of its tokens each, for long contexts (Ulysses); divides `world_size` and "
        "the model's attention heads. 1: none do.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that compute each microbatch together, a part of each layer's matrices each (Llama, Qwen2, Qwen3); divides "
        "`world_size`. 1: none do.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of torch per rank.")
    microbatch_tokens: int = Field(
        16384, ge=1, description="Packed tokens per forward and rank; of a microbatch that ranks share, of all of them together."
    )
    shared_prefix: bool = Field(
        False,
        description="Compute a prompt that attempts of a group share once per microbatch; pays where prompts are not much shorter than "
        "responses. Attention is then `segment_sdpa`.",
    )
    minibatches_per_step: int = Field(1, ge=1, description="Optimizer updates per epoch over the batch, cut by groups.")
    epochs_per_step: int = Field(1, ge=1, description="Passes over the batch.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    logprob_chunk_tokens: int | None = Field(
        None, ge=1, description="Tokens whose logits exist at once; None: about 64 MiB of logits on a CPU, 512 MiB on a GPU."
    )
    compile: bool = Field(False, description="Compile each layer with torch.compile; the first updates wait for the compiler.")
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none",
        description="What leaves the GPU: optimizer, its state between updates; parameters, weights, gradients and state, which are "
        "then updated on the CPU.",
    )
    fsdp: FSDPConfig = FSDPConfig()
    collective_timeout_s: float = Field(300.0, gt=0, description="A collective that takes longer lost a rank.")
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same microbatches."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: ranks with microbatches of their own; of those that share them, one counts."""
        return self.world_size // self.num_replicas

    @model_validator(mode="after")
    def _microbatches_are_shared_evenly(self) -> LearnerConfig:
        for name in ("sequence_parallel", "tensor_parallel"):
            size = getattr(self, name)
            if self.world_size % size:
                raise ValueError(
                    f"{name}={size} does not divide world_size={self.world_size}; every microbatch is shared by as many ranks as the others"
                )
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()
        return self

    def _check_tensor_parallel(self) -> None:
        refused = {
            f"sequence_parallel={self.sequence_parallel}": self.sequence_parallel > 1,
            f"fsdp.shard_size={self.fsdp.shard_size}": self.fsdp.shard_size is not None,
            "compile=true": self.compile,
        }
        for key, is_set in refused.items():
            if is_set:
                raise ValueError(f"tensor_parallel={self.tensor_parallel} does not go with {key}; leave one of the two out")

    @model_validator(mode="after")
    def _copies_are_even(self) -> LearnerConfig:
        _refuse_uneven_copies(self.fsdp, self.world_size)
        return self


def _refuse_uneven_copies(fsdp: FSDPConfig, world_size: int) -> None:
    if fsdp.shard_size is not None and world_size % fsdp.shard_size:
        raise ValueError(
            f"fsdp.shard_size={fsdp.shard_size} does not divide world_size={world_size}; "
            "every copy of the weights needs as many ranks as the others"
        )


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule, of the critic."""

    lr: float = Field(1e-5, gt=0, description="Peak learning rate; a critic takes a larger one than the policy.")


class CriticModelConfig(Section):
    """What the critic starts from; everything else is as in `model`."""

    path: str | None = Field(
        None,
        description="Folder or hub id: a causal model gets a value head that begins at 0, a sequence classifier (as `agentrl rm` trains) "
        "keeps its own; None: model.path.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id; None: its main branch.")
    lora: LoRAConfig = LoRAConfig()


class CriticConfig(Section):
    """The value model of PPO: its own weights and optimizer; `learner` says how it is spread and packed."""

    enabled: bool | None = Field(
        None, description="None: when algorithm.advantage is gae or gae_turn; true: for an estimator of your own that reads values."
    )
    model: CriticModelConfig = CriticModelConfig()
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    cliprange_value: float | None = Field(
        0.5, gt=0, description="How far a value may go in one step before its loss stops, in the reward's unit; None: plain squared error."
    )
    warmup_steps: int = Field(0, ge=0, description="First steps in which the critic alone learns, and the policy stays as it is.")
    epochs_per_step: int | None = Field(None, ge=1, description="Passes of the critic over the batch; None: learner.epochs_per_step.")


# --------------------------------------------------------------------------------------------------------- reward


REWARD_PRESETS: dict[str, str] = {
    "arithmetic": "arithmetic",
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
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
}


class CustomFunctionConfig(Section):
    """Your own `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

    path: str | None = Field(None, description="Python file; None: rewards are chosen by `reward.sources`.")
    name: str = Field("compute_score", description="Function in that file; sync or async.")
    kwargs: dict[str, Any] = Field({}, description="Further keyword arguments.")
    scope: Literal["trajectory", "batch"] = Field(
        "trajectory",
        description="trajectory: called per attempt; batch: once per batch, as `f(data_sources, solution_strs, ground_truths, extra_infos)`.",
    )
    runs_in: Literal["thread", "process", "inline"] = Field(
        "thread",
        description="Where a sync function runs: in a thread, in a process that is killed at the deadline, or (microseconds only) in the event loop.",
    )


class RewardTermConfig(Section):
    """One more term of the reward."""

    reward: str | None = Field(None, description="Registered reward; None: the term's own name.")
    weight: float = Field(1.0, description="Its factor in the sum; 0: only reported.")
    sources: tuple[str, ...] = Field((), description="Data sources it applies to, `*` stands for any text; (): all.")
    config: dict[str, Any] = Field({}, description="Its `config` dictionary, over that of reward.reward_config.")
    timeout_s: float | None = Field(None, gt=0, description="Its deadline; None: reward.timeout_s.")


class RewardConfig(Section):
    """Which reward scores which row: one by the row's data source (or your function), and any number of named terms beside it."""

    sources: dict[str, str] = Field(
        REWARD_PRESETS,
        description="data_source -> registered reward; your entries are added to the presets. `*` in a data source stands for any text; "
        "an exact name goes before a pattern, a longer pattern before a shorter.",
    )
    custom_function: CustomFunctionConfig = CustomFunctionConfig()
    reward_config: dict[str, dict[str, Any]] = Field({}, description="Reward name -> its `config` dictionary.")
    weight: float = Field(1.0, description="Weight of the row's own reward (by `sources` or `custom_function`) in the sum.")
    terms: dict[str, RewardTermConfig] = Field({}, description="Name -> further term, such as length_penalty, format, llm_judge.")
    assignment: Literal["mixed", "end"] = Field(
        "mixed",
        description="mixed: rewards of turns lie on their turn, all others on the last action token; end: all on the last action token.",
    )
    num_processes: int = Field(1, ge=1, description="Processes per rollout actor for rewards that run in one of their own.")
    num_examine: int = Field(0, ge=0, description="Scored attempts printed in full at each validation, one of each data source first.")
    timeout_s: float = Field(30.0, gt=0, description="Deadline of one call of a reward.")
    tool_reward_weight: float = Field(0.0, description="Weight of the rewards that tools give per turn; 0: only reported.")
    interaction_reward_weight: float = Field(
        0.0, description="Weight of the rewards that interactions give, per turn and at the end; 0: only reported."
    )

    @model_validator(mode="after")
    def _keep_presets(self) -> RewardConfig:
        object.__setattr__(self, "sources", {**type(self).model_fields["sources"].default, **self.sources})
        return self


# --------------------------------------------------------------------------------------------------- reward model

REWARD_MODEL = "reward_model"
"""The registered reward that asks the reward model."""


class RewardModelConfig(Section):
    """The reward model of a run: a role of its own, asked by the terms with `reward: reward_model` once per batch."""

    model: ModelConfig = ModelConfig()
    max_tokens: int | None = Field(None, ge=1, description="Longest conversation; None: as many tokens as the model has positions.")
    overlong: Literal["truncate", "skip"] = Field(
        "truncate",
        description="A longer one loses its beginning (share: `reward/<term>/truncated`), or the term does not apply to it (`reward/<term>/applied`).",
    )
    render: Literal["turns", "template"] = Field(
        "turns",
        description="The text that is scored. turns: as `agentrl rm` trains, each turn as a model would have sampled it, up to the token that "
        "ends the last one; template: what apply_chat_template gives, for models that were trained on that.",
    )
    world_size: int = Field(1, ge=1, description="Ranks, over which weights and conversations are spread.")
    threads: int = Field(1, ge=1, description="CPU threads of torch per rank.")
    microbatch_tokens: int = Field(16384, ge=1, description="Packed tokens per forward and rank; a longer conversation stands alone.")
    offload: Literal["none", "parameters"] = Field("none", description="parameters: the weights wait on the CPU for each forward.")
    fsdp: FSDPConfig = FSDPConfig()
    collective_timeout_s: float = Field(300.0, gt=0, description="A collective that takes longer lost a rank.")

    @property
    def is_used(self) -> bool:
        return bool(self.model.path)

    @property
    def as_learner(self) -> LearnerConfig:
        """What ranks and sharding read of a learner."""
        shared = ("world_size", "threads", "microbatch_tokens", "offload", "fsdp", "collective_timeout_s")
        return LearnerConfig(**{name: getattr(self, name) for name in shared})

    @model_validator(mode="after")
    def _is_frozen(self) -> RewardModelConfig:
        if self.model.lora.rank > 0:
            raise ValueError(f"reward_model.model.lora.rank={self.model.lora.rank}: the reward model is not trained here; leave it 0")
        return self

    @model_validator(mode="after")
    def _copies_are_even(self) -> RewardModelConfig:
        _refuse_uneven_copies(self.fsdp, self.world_size)
        return self


# ------------------------------------------------------------------------------------------------------ algorithm


class RejectionConfig(Section):
    """One stage of rejection: tokens whose statistic of log rho' (proximal / behavior) is out of bounds leave the loss."""

    statistic: Literal["k1", "k2", "k3"] = Field(
        "k1", description="k1: log rho', with bounds on rho' itself; k2: its square / 2; k3: rho' - 1 - log rho'; those know `upper` alone."
    )
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        "sequence_mean", description="What is judged: each token, or a whole sequence by the sum, the mean or the farthest of its tokens."
    )
    lower: float | None = Field(None, gt=0, description="Lowest rho' that is kept; None: no such bound.")
    upper: float | None = Field(None, gt=0, description="Highest rho' (k1) or statistic (k2, k3) that is kept; None: no such bound.")

    @model_validator(mode="after")
    def _has_bounds(self) -> RejectionConfig:
        if self.statistic != "k1" and self.lower is not None:
            raise ValueError(
                f"statistic={self.statistic} is never negative and has no lower bound (is {self.lower:g}); write `upper` alone"
            )
        if self.lower is None and self.upper is None:
            raise ValueError("a stage without lower and upper rejects nothing; write one of them")
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower={self.lower:g} is not below upper={self.upper:g}")
        return self


class CorrectionConfig(Section):
    """Off-policy correction: how much a token weighs, and which tokens leave the loss, by rho' = proximal / behavior."""

    weight: Literal["none", "token", "sequence", "geometric"] = Field(
        "token", description="Importance weight: rho' of the token, its product over the sequence, or its geometric mean there."
    )
    cap: float = Field(2.0, gt=0, description="Upper bound of the weight.")
    floor: float | None = Field(None, gt=0, description="Lower bound of the weight; None: none.")
    outside: Literal["truncate", "mask"] = Field("truncate", description="A weight out of bounds is cut to the bound, or 0 (IcePop).")
    self_normalize: bool = Field(False, description="Divide the weights by their mean over the accepted tokens of the whole update.")
    reject: dict[str, RejectionConfig] = Field({}, description="Name -> stage of rejection; a token must pass all of them.")
    m2po_threshold: float | None = Field(
        None,
        gt=0,
        description="Drop the largest (log rho')^2 until their mean over the update is at most this; last of the stages. None: off.",
    )
    opsm_delta: float | None = Field(
        None,
        ge=0,
        description="Leave a sequence of negative advantage out of the policy loss when its mean log(proximal / policy) is above; None: off.",
    )
    max_lag: int | None = Field(
        None,
        ge=0,
        description="Tokens older than so many versions leave the loss, the rest of their group stays; None: buffer.max_staleness alone.",
    )
    denominator: Literal["accepted", "original"] = Field(
        "accepted", description="Tokens that a mean over tokens counts: those in the loss, or all action tokens, rejected ones included."
    )

    @model_validator(mode="after")
    def _has_a_band(self) -> CorrectionConfig:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"floor={self.floor:g} is not below cap={self.cap:g}")
        return self


class KLConfig(Section):
    """KL to the reference policy, in the loss or in the reward."""

    coefficient: float = Field(0.0, ge=0, description="0: no reference model is loaded.")
    place: Literal["loss", "reward"] = Field(
        "loss", description="loss: a term of the loss; reward: taken from the reward of each action token, before advantages are estimated."
    )
    estimator: Literal["k1", "k2", "k3", "abs", "k3_k2grad"] = Field(
        "k3_k2grad",
        description="k1 is the one for the reward, and refused in the loss, where its expected gradient is zero; in the reward "
        "k3_k2grad counts as k3.",
    )
    target: float | None = Field(
        None,
        gt=0,
        description="With place=reward: the coefficient adapts so that the mean KL per action token comes to this, in nats; None: fixed.",
    )
    horizon: int = Field(10000, ge=1, description="Trajectories in which the adapted coefficient may about double.")
    off_policy_ratio: bool = Field(
        False,
        description="Times policy / proximal, so that tokens count as sampled from the current policy; makes the gradient of k3 exact.",
    )

    @model_validator(mode="after")
    def _fits_its_place(self) -> KLConfig:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("estimator=k1 in the loss has an expected gradient of zero; use k3_k2grad or k2, or place=reward")
        if self.place == "loss" and self.target is not None:
            raise ValueError(f"target={self.target:g} adapts the coefficient of KL in the reward; use place=reward, or leave target out")
        if self.target is not None and self.coefficient == 0:
            raise ValueError(f"target={self.target:g} multiplies a coefficient of 0; begin with a coefficient above 0, such as 0.01")
        return self


class SAPOConfig(Section):
    """Temperatures of the soft gate of policy_loss=sapo."""

    tau_positive: float = Field(1.0, gt=0, description="At positive advantage.")
    tau_negative: float = Field(1.05, gt=0, description="At negative advantage: larger fades faster.")


class ClipCovConfig(Section):
    """Which tokens policy_loss=clip_cov leaves out."""

    share: float = Field(2e-4, gt=0, lt=1, description="Of all loss tokens of the update, at least one.")
    lower: float = Field(1.0, description="Only tokens with a covariance above.")
    upper: float = Field(5.0, description="Only tokens with a covariance below.")


class KLCovConfig(Section):
    """Which tokens policy_loss=kl_cov holds back."""

    share: float = Field(2e-3, gt=0, lt=1, description="Of all loss tokens of the update, at least one: those of the largest covariance.")
    coefficient: float = Field(1.0, gt=0, description="Weight of |log ratio| on them.")


class DPPOConfig(Section):
    """The trust region of policy_loss=dppo_tv, in probability."""

    delta_low: float = Field(0.2, gt=0, le=1, description="A token may lose so much probability.")
    delta_high: float = Field(0.2, gt=0, le=1, description="A token may gain so much probability.")


GROUP_ADVANTAGES = (
    *("grpo", "dr_grpo", "rloo", "opo", "gpg", "max_rl", "grpo_passk", "pass_at_k"),
    *("reinforce_plus_plus_baseline", "turn_group", "gigpo"),
)
"""Estimators that compare the attempts of a group."""

CRITIC_ADVANTAGES = ("gae", "gae_turn")
"""Estimators that stand on a critic."""

ADVANTAGES = (*GROUP_ADVANTAGES, "reinforce_plus_plus", "remax", *CRITIC_ADVANTAGES)
"""Estimators that a run can serve."""

POLICY_LOSSES = ("ppo_clip", "gspo", "gmpo", "cispo", "reinforce", "gpg", "sapo", "clip_cov", "kl_cov", "dppo_tv")

SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Losses whose ratio belongs to a sequence: they are means over sequences, or a long one would count its one ratio many times."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    advantage: str = Field(
        "grpo",
        description=f"Advantage estimator: {', '.join(ADVANTAGES)}; your own: `file.py:function`, or an entry point of agentrl.advantages.",
    )
    gamma: float = Field(
        1.0, ge=0, le=1, description="Discount per action token (gae, reinforce_plus_plus) or per turn (gae_turn, turn_group, gigpo)."
    )
    lam: float = Field(1.0, ge=0, le=1, description="Lambda of generalized advantage estimation, for estimators with a critic.")
    bootstrap_truncated: bool = Field(False, description="With a critic: a truncated attempt goes on in value instead of ending at 0.")
    singleton: Literal["zero", "raw"] = Field(
        "zero", description="Advantage of a group of one, which has nothing to be compared with: 0, or its reward as it is."
    )
    passk_k: int = Field(4, ge=1, description="k of pass_at_k: attempts of which one must be solved; at most rollout.group_size.")
    solved_reward: float = Field(1.0, description="Reward from which an attempt counts as solved, for pass_at_k.")
    step_weight: float = Field(1.0, ge=0, description="Weight of the step advantage beside that of the episode, for gigpo.")
    whiten: bool = Field(
        False, description="Whiten advantages over all action tokens of the batch at last; groups of equal reward then leave 0."
    )
    policy_loss: str = Field(
        "ppo_clip",
        description=f"Policy loss: {', '.join(POLICY_LOSSES)}; your own: `file.py:function`, or an entry point of agentrl.policy_losses.",
    )
    loss_options: dict[str, Any] = Field({}, description="Keyword arguments of a policy loss of your own.")
    mode: Literal["auto", "decoupled", "bypass", "on_policy"] = Field(
        "auto",
        description="Where the proximal policy comes from; auto: on_policy when max_staleness=0 and one update per step, else decoupled.",
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip of the ratio, 1 - clip_low; gmpo: of its log, -clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Upper clip of the ratio, 1 + clip_high; gmpo: of its log, clip_high.")
    dual_clip: float | None = Field(3.0, gt=1, description="Bound of the loss at negative advantage, of ppo_clip and clip_cov; None: off.")
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"] = Field(
        "token_mean", description="How token losses become one number."
    )
    constant_length: int | None = Field(None, ge=1, description="L_max of aggregation `constant`; None: agent.max_response_tokens.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    sapo: SAPOConfig = SAPOConfig()
    clip_cov: ClipCovConfig = ClipCovConfig()
    kl_cov: KLCovConfig = KLCovConfig()
    dppo_tv: DPPOConfig = DPPOConfig()

    @field_validator("policy_loss")
    @classmethod
    def _is_known_loss(cls, name: str) -> str:
        if name in POLICY_LOSSES or ":" in name:
            return name
        installed = {entry.name for entry in entry_points(group="agentrl.policy_losses")}
        if name in installed:
            return name
        raise ValueError(
            f"there is no policy loss {name!r}; use one of {', '.join([*POLICY_LOSSES, *sorted(installed)])}, or file.py:function"
        )

    @model_validator(mode="after")
    def _fits_the_loss(self) -> AlgorithmConfig:
        if self.policy_loss in SEQUENCE_LOSSES and self.aggregation != "sequence_mean_token_mean":
            raise ValueError(
                f"policy_loss={self.policy_loss} has one ratio per sequence and aggregation={self.aggregation} would weigh it by length; "
                "use aggregation=sequence_mean_token_mean"
            )
        if self.loss_options and self.policy_loss in POLICY_LOSSES:
            raise ValueError(f"loss_options are for a policy loss of your own; {self.policy_loss} has its own keys")
        return self

    @field_validator("advantage")
    @classmethod
    def _is_served(cls, name: str) -> str:
        if name in ADVANTAGES or ":" in name:
            return name
        installed = {entry.name for entry in entry_points(group="agentrl.advantages")}
        if name in installed:
            return name
        raise ValueError(f"there is no estimator {name!r}; use one of {', '.join([*ADVANTAGES, *sorted(installed)])}, or file.py:function")


# -------------------------------------------------------------------------------------------------------- trainer


class TrainerConfig(Section):
    """The run: how long, how often, where."""

    steps: int | None = Field(None, ge=1, description="Batches to train on; None: by total_epochs.")
    total_epochs: int = Field(1, ge=1, description="Passes over the training rows when `steps` is None.")
    save_freq: int = Field(-1, ge=-1, description="Checkpoint every N steps (and at the end); -1: never.")
    test_freq: int = Field(-1, ge=-1, description="Validate every N steps; -1: never.")
    val_before_train: bool = Field(True, description="Validate before the first step, if there are val_files.")
    val_only: bool = Field(False, description="Validate and stop.")
    resume_mode: str = Field(
        "auto", description="auto: from the newest checkpoint of the run directory; disable; or the path of a checkpoint."
    )
    save_in_background: bool = Field(
        True, description="Go on while a checkpoint is written; costs one more copy of its data in memory for that time."
    )
    keep_last: int = Field(3, ge=1, description="Newest checkpoints kept.")
    keep_best: int = Field(0, ge=0, description="Checkpoints kept beside them: the best by `best_metric`; 0: none.")
    best_metric: str = Field("val/reward_mean", description="Metric of validation that the best checkpoints are chosen by.")
    best_mode: Literal["max", "min"] = Field("max", description="Whether a larger or a smaller `best_metric` is better.")
    run_dir: str | None = Field(None, description="Folder of the run; None: runs/<project_name>/<experiment_name>.")
    project_name: str = Field("agentrl", description="Name of the project, for trackers.")
    experiment_name: str = Field("default", description="Name of the run.")
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = Field(
        ("console",), description="Trackers beside metrics.jsonl, which is always written."
    )
    rollout_data_dir: str | None = Field(
        None, description="Where training trajectories are kept as Parquet; None: trajectories/ of the run directory."
    )
    validation_data_dir: str | None = Field(None, description="The same for validation; None: validation/ of the run directory.")
    keep_trajectories: bool = Field(True, description="Write the trajectories at all.")
    seed: int = Field(0, ge=0, description="Seed of data order, initialisation and learner.")
    profile_steps: tuple[int, ...] = Field(
        (), description="Steps, from 1, whose learning torch's profiler records on every rank, into traces/ of the run directory."
    )


class ClusterConfig(Section):
    """Ray."""

    address: str | None = Field(None, description="None: start Ray on this machine; `auto` or an address joins a cluster.")
    num_cpus: int | None = Field(None, ge=1, description="CPUs of a started Ray; None: what this process may use.")


class AlarmsConfig(Section):
    """Bounds on what a step measures. Crossing one warns and keeps the groups concerned; it never ends a run. None: no such alarm."""

    min_entropy_share: float | None = Field(0.1, gt=0, lt=1, description="Lowest entropy, as a share of the first steps'.")
    min_ess: float | None = Field(0.3, gt=0, lt=1, description="Lowest effective sample size of the raw weights, a share of tokens.")
    max_ratio: float | None = Field(10.0, gt=1, description="Largest ratio of policy to proximal policy on a token.")
    max_length_change: float | None = Field(
        2.0, gt=1, description="Largest factor by which the mean response may grow or shrink against the first steps'."
    )
    max_logprob_gap: float | None = Field(
        0.2, gt=0, description="Largest mean |policy - behavior| log-probability, nats: server against learner, staleness included."
    )
    max_clip_share: float | None = Field(0.3, gt=0, lt=1, description="Largest share of loss tokens on which a clip decides.")
    max_constant_groups: float | None = Field(0.9, gt=0, lt=1, description="Largest share of groups whose rewards are all equal.")
    window_steps: int = Field(
        10, ge=1, description="Of what is compared with the first steps, so many are averaged there and so many of the latest."
    )
    dump_groups: int = Field(8, ge=0, description="Groups kept as Parquet in alarms/ of the run directory per alarm; 0: none.")


class TrackingConfig(Section):
    """What is shown and kept."""

    wandb_mode: Literal["online", "offline", "disabled"] = Field("offline", description="wandb's mode; offline needs no network.")
    report: bool = Field(True, description="Draw report.png at the end.")
    baselines: dict[str, str] = Field({}, description="Name -> model folder, validated before training and shown in the closing table.")
    alarms: AlarmsConfig = AlarmsConfig()


class EvalConfig(Section):
    """Sampling of validation."""

    n: int = Field(1, ge=1, description="Attempts per validation row.")
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, description="-1: off.")
    min_p: float = Field(0.0, ge=0, le=1, description="0: off.")
    timeout_s: float = Field(1800.0, gt=0, description="Deadline of one whole validation.")


def _refuse_impossible_layout(placement: PlacementConfig, num_ranks: Mapping[Role, int], cluster: ClusterConfig) -> None:
    placement.layout(num_ranks)
    for name, pool in placement.pools.items():
        if pool.nodes > 1 and cluster.address is None:
            raise ValueError(
                f"placement.pools.{name}.nodes={pool.nodes}, but a Ray of this machine has one; set cluster.address to join a cluster"
            )


class Config(Section):
    """A whole run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: PlacementConfig = PlacementConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    tracking: TrackingConfig = TrackingConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def policy_mode(self) -> Literal["decoupled", "bypass", "on_policy"]:
        """`algorithm.mode` with auto resolved: on_policy when nothing can be stale and the batch is updated on once, else decoupled."""
        if self.algorithm.mode != "auto":
            return self.algorithm.mode
        updates = self.learner.minibatches_per_step * self.learner.epochs_per_step
        return "on_policy" if self.buffer.max_staleness == 0 and updates == 1 else "decoupled"

    @property
    def has_greedy(self) -> bool:
        """Whether each group has a greedy attempt beside the sampled ones."""
        return self.rollout.greedy_baseline == "always" or self.algorithm.advantage == "remax"

    @property
    def attempts_per_group(self) -> int:
        """Attempts played per group, the greedy one included."""
        return self.rollout.group_size + self.has_greedy

    @property
    def num_ranks(self) -> dict[Role, int]:
        """The roles that this run has, and how many ranks (or servers) each of them."""
        ranks: dict[Role, int] = {"actor": self.learner.world_size}
        if self.has_critic:
            ranks["critic"] = self.learner.world_size
        if self.reward_model.is_used:
            ranks["reward_model"] = self.reward_model.world_size
        if not self.rollout.urls:
            ranks["servers"] = self.rollout.num_servers
        return ranks

    @property
    def algorithm_in_use(self) -> AlgorithmConfig:
        """`algorithm` with what it takes from other groups."""
        length = self.algorithm.constant_length or self.agent.max_response_tokens
        return self.algorithm.model_copy(update={"constant_length": length})

    @property
    def has_critic(self) -> bool:
        """`critic.enabled` with None resolved."""
        return self.algorithm.advantage in CRITIC_ADVANTAGES if self.critic.enabled is None else self.critic.enabled

    @property
    def critic_model(self) -> ModelConfig:
        """The critic's model: `critic.model` over `model`."""
        own = self.critic.model
        base = {} if own.path is None else {"path": own.path, "revision": own.revision}
        return self.model.model_copy(update={**base, "tokenizer_path": self.model.tokenizer_path or self.model.path, "lora": own.lora})

    @property
    def critic_epochs(self) -> int:
        """`critic.epochs_per_step` with None resolved."""
        return self.critic.epochs_per_step or self.learner.epochs_per_step

    @model_validator(mode="after")
    def _check_critic(self) -> Config:
        name = self.algorithm.advantage
        if name in CRITIC_ADVANTAGES and self.critic.enabled is False:
            raise ValueError(f"algorithm.advantage={name} stands on a critic; leave critic.enabled=false out")
        if self.critic.enabled and name in ADVANTAGES and name not in CRITIC_ADVANTAGES:
            raise ValueError(f"critic.enabled=true, but algorithm.advantage={name} gives a critic nothing to learn; use gae or gae_turn")
        if self.has_critic and self.trainer.steps is not None and self.critic.warmup_steps >= self.trainer.steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves the policy none of trainer.steps={self.trainer.steps} to learn in; "
                "use fewer"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_prefix(self) -> Config:
        _refuse_shared_prefix(self.model, self.learner)
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Config:
        _refuse_impossible_layout(self.placement, self.num_ranks, self.cluster)
        absent = [role for role in self.profiler.nsight.roles if role not in self.num_ranks]
        if absent:
            raise ValueError(f"profiler.nsight.roles names {absent[0]}, which this run does not have; it has: {', '.join(self.num_ranks)}")
        return self

    @model_validator(mode="after")
    def _check_constant_groups(self) -> Config:
        if self.buffer.drop_constant_groups and self.attempts_per_group == 1:
            raise ValueError(
                "buffer.drop_constant_groups with rollout.group_size=1 would drop every group: one attempt has no variance; use group_size>=2"
            )
        if self.buffer.drop_constant_groups and self.reward.custom_function.path and self.reward.custom_function.scope == "batch":
            raise ValueError(
                "buffer.drop_constant_groups needs rewards when a group is complete, but reward.custom_function.scope=batch scores later; "
                "use scope=trajectory"
            )
        return self

    @property
    def asks_reward_model(self) -> tuple[str, ...]:
        """The keys that name the reward of the reward model."""
        terms = (f"reward.terms.{name}" for name, term in self.reward.terms.items() if (term.reward or name) == REWARD_MODEL)
        return (*terms, *(f"reward.sources.{source}" for source, name in self.reward.sources.items() if name == REWARD_MODEL))

    @model_validator(mode="after")
    def _reward_model_is_asked(self) -> Config:
        asking = self.asks_reward_model
        if asking and not self.reward_model.is_used:
            raise ValueError(f"{asking[0]} asks the reward model, but reward_model.model.path is empty; name a folder or hub id there")
        if self.reward_model.is_used and not asking:
            raise ValueError(
                f"reward_model.model.path={self.reward_model.model.path!r} is asked by nothing; "
                "add a term, such as reward.terms.helpful={reward: reward_model}"
            )
        late = next((name for name, term in self.reward.terms.items() if (term.reward or name) == REWARD_MODEL and term.timeout_s), None)
        if late is not None:
            raise ValueError(
                f"reward.terms.{late}.timeout_s: the reward model has deadlines of its own; use reward_model.collective_timeout_s"
            )
        return self

    def _stages_without_ratio(self) -> str | None:
        """Name a stage of the correction that could never do anything in this policy mode."""
        correction = self.algorithm.correction
        if correction.reject:
            return "reject"
        if correction.m2po_threshold is not None:
            return "m2po_threshold"
        if correction.self_normalize:
            return "self_normalize"
        return "opsm_delta" if correction.opsm_delta is not None and self.policy_mode == "on_policy" else None

    @model_validator(mode="after")
    def _check_across_groups(self) -> Config:
        updates = self.learner.minibatches_per_step * self.learner.epochs_per_step
        if self.algorithm.mode == "on_policy" and (self.buffer.max_staleness > 0 or updates > 1):
            raise ValueError(
                f"algorithm.mode=on_policy needs buffer.max_staleness=0 (is {self.buffer.max_staleness}) and one update per step (is {updates}); "
                "use algorithm.mode=decoupled"
            )
        if self.algorithm.advantage == "pass_at_k" and self.algorithm.passk_k > self.rollout.group_size:
            raise ValueError(
                f"algorithm.passk_k={self.algorithm.passk_k} exceeds rollout.group_size={self.rollout.group_size}: "
                "pass_at_k draws k attempts out of a group"
            )
        if self.policy_mode != "decoupled" and (needless := self._stages_without_ratio()):
            raise ValueError(
                f"algorithm.correction.{needless} compares the proximal with another policy, and with algorithm.mode={self.policy_mode} they are "
                "the same; use algorithm.mode=decoupled"
            )
        if self.trainer.keep_best > 0 and (min(self.trainer.save_freq, self.trainer.test_freq) < 1 or not self.data.val_files):
            raise ValueError(
                f"trainer.keep_best={self.trainer.keep_best} needs checkpoints and validations to choose from: set trainer.save_freq, "
                "trainer.test_freq and data.val_files"
            )
        if self.learner.minibatches_per_step > self.buffer.groups_per_step:
            raise ValueError(
                f"learner.minibatches_per_step={self.learner.minibatches_per_step} exceeds buffer.groups_per_step={self.buffer.groups_per_step}: "
                "a minibatch holds at least one group"
            )
        return self


# ------------------------------------------------------------------------------------------------------------ sft


class SFTDataConfig(Section):
    """Conversations to imitate: a column of messages, or a column of prompts and one of responses."""

    train_files: tuple[str, ...] = Field((), description="Parquet or JSON-lines files to learn from.")
    val_files: tuple[str, ...] = Field((), description="Files of the same form, held out: their loss is measured, nothing is learned.")
    messages_key: str = Field("messages", description="Column of the chat messages; every assistant message is learned.")
    prompt_key: str | None = Field(
        None, description="Column of the prompt, a text or messages; `column.field` looks into a struct; None: rows have `messages_key`."
    )
    response_key: str | None = Field(
        None, description="Column of the response, a text, which alone is learned; goes with `prompt_key`; None: rows have `messages_key`."
    )
    tools_key: str = Field("tools", description="Column of the tools shown, names or schemas; may be absent.")
    max_tokens: int = Field(1024, ge=1, description="Longest conversation.")
    overlong: Literal["drop", "truncate"] = Field(
        "drop", description="What happens to a longer one: left out, or cut behind `max_tokens`; both are counted."
    )

    @model_validator(mode="after")
    def _names_both_or_none(self) -> SFTDataConfig:
        if (self.prompt_key is None) != (self.response_key is None):
            given, missing = ("prompt_key", "response_key") if self.response_key is None else ("response_key", "prompt_key")
            raise ValueError(f"data.{given} goes with data.{missing}: name both columns, or neither and use data.messages_key")
        return self


class SFTTrainerConfig(Section):
    """How long, how often, where."""

    steps: int | None = Field(None, ge=1, description="Optimizer updates; None: by total_epochs.")
    total_epochs: int = Field(1, ge=1, description="Passes over the training rows when `steps` is None; the last batch may be smaller.")
    batch_size: int = Field(64, ge=1, description="Conversations per update.")
    test_freq: int = Field(-1, ge=-1, description="Measure the validation loss every N updates; -1: only at the end.")
    save_freq: int = Field(-1, ge=-1, description="Checkpoint every N updates (and at the end); -1: never.")
    resume_mode: str = Field(
        "auto", description="auto: from the newest checkpoint of the run directory; disable; or the path of a checkpoint."
    )
    keep_last: int = Field(3, ge=1, description="Checkpoints kept.")
    output: str = Field("policy", description="Folder of the trained model, in Hugging Face format.")
    export: Literal["last", "best"] = Field(
        "last", description="What `output` gets: the last weights, or those with the lowest validation loss so far."
    )
    untrained_output: str | None = Field(
        None, description="Folder for the model as it was before the first update, a baseline; None: not kept."
    )
    run_dir: str | None = Field(
        None, description="Folder of metrics.jsonl, config.yaml and checkpoints; None: `output` with _run behind it."
    )
    seed: int = Field(0, ge=0, description="Seed of initialisation and order.")
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = Field(("console",), description="Trackers beside metrics.jsonl.")
    wandb_mode: Literal["online", "offline", "disabled"] = Field("offline", description="wandb's mode; offline needs no network.")


class ModelFromScratchConfig(Section):
    """A new small model instead of `model.path`; without `model.tokenizer_path` it gets the byte-level tokenizer of this project."""

    architecture: Literal["none", "qwen2"] = Field("none", description="none: start from model.path.")
    sizes: dict[str, Any] = Field({}, description="hidden_size, num_hidden_layers, ... of the architecture's config.")


class SFTConfig(Section):
    """A supervised run (`agentrl sft`)."""

    data: SFTDataConfig = SFTDataConfig()
    model: ModelConfig = ModelConfig()
    from_scratch: ModelFromScratchConfig = ModelFromScratchConfig()
    agent: AgentConfig = AgentConfig()
    learner: LearnerConfig = LearnerConfig()
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _has_what_best_needs(self) -> SFTConfig:
        _refuse_best_without_validation(self.trainer, self.data.val_files)
        _refuse_shared_prefix(self.model, self.learner)
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> SFTConfig:
        _refuse_impossible_layout(self.placement, {"actor": self.learner.world_size}, self.cluster)
        return self


def _refuse_shared_prefix(model: ModelConfig, learner: LearnerConfig) -> None:
    if not learner.shared_prefix:
        return
    if model.attention not in ("auto", "segment_sdpa"):
        raise ValueError(
            f"learner.shared_prefix needs an attention in which several segments read one prompt, which {model.attention} is not; "
            "use model.attention=segment_sdpa"
        )
    if learner.sequence_parallel > 1:
        raise ValueError(
            f"learner.shared_prefix does not go with learner.sequence_parallel={learner.sequence_parallel}; use sequence_parallel=1"
        )


def _refuse_best_without_validation(trainer: SFTTrainerConfig, val_files: tuple[str, ...]) -> None:
    if trainer.export == "best" and not val_files:
        raise ValueError("trainer.export=best is chosen by the validation loss: name data.val_files, or use trainer.export=last")


# ----------------------------------------------------------------------------------------------------- reward model


class RMDataConfig(Section):
    """Pairs of answers, of which people (or a program) preferred one."""

    train_files: tuple[str, ...] = Field((), description="Parquet or JSON-lines files to learn from.")
    val_files: tuple[str, ...] = Field((), description="Files of the same form, held out: their loss and accuracy are measured.")
    prompt_key: str = Field("prompt", description="Column of the prompt, a text or messages; absent where the answers hold it.")
    chosen_key: str = Field("chosen", description="Column of the preferred answer, a text or messages.")
    rejected_key: str = Field("rejected", description="Column of the other answer, of the same form.")
    tools_key: str = Field("tools", description="Column of the tools shown, names or schemas; may be absent.")
    max_tokens: int = Field(1024, ge=2, description="Longest conversation, prompt and answer.")
    overlong: Literal["drop", "truncate"] = Field(
        "drop", description="What happens to a pair with a longer one: left out, or its beginning is cut off; both are counted."
    )


class RMTrainerConfig(SFTTrainerConfig):
    """How long, how often, where."""

    batch_size: int = Field(64, ge=1, description="Pairs per update.")
    output: str = Field("reward_model", description="Folder of the trained model, in Hugging Face format.")


class RMConfig(Section):
    """The training of a reward model (`agentrl rm`)."""

    data: RMDataConfig = RMDataConfig()
    model: ModelConfig = ModelConfig()
    from_scratch: ModelFromScratchConfig = ModelFromScratchConfig()
    agent: AgentConfig = AgentConfig()
    learner: LearnerConfig = LearnerConfig()
    trainer: RMTrainerConfig = RMTrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _has_what_best_needs(self) -> RMConfig:
        _refuse_best_without_validation(self.trainer, self.data.val_files)
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> RMConfig:
        _refuse_impossible_layout(self.placement, {"actor": self.learner.world_size}, self.cluster)
        return self
