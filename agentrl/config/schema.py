"""The schema of a run: its sections, and the checks that involve several of them.

Each section is a module of this package. It is the only place of its defaults, and has the checks that
involve it alone. A component receives its own section, never the whole config. Units are suffixes (`_s`
seconds, `_tokens`, `_bytes`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from pydantic import model_validator

from agentrl.config.agent import AgentConfig
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.buffer import BufferConfig
from agentrl.config.cluster import ClusterConfig, refuse_impossible_layout
from agentrl.config.critic import CriticConfig
from agentrl.config.data import DataConfig
from agentrl.config.distillation import TEACHER_SERVERS
from agentrl.config.evaluation import EvalConfig
from agentrl.config.frozen_servers import FrozenPlan, FrozenServersConfig
from agentrl.config.learner import LearnerConfig, refuse_shared_prefix
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.opponents import opponent_key
from agentrl.config.placement import PlacementConfig, Role
from agentrl.config.profiler import ProfilerConfig
from agentrl.config.reward import CustomFunctionConfig, RewardConfig
from agentrl.config.reward_model import REWARD_MODEL, RewardModelConfig
from agentrl.config.rollout import MAX_ADAPTERS, RolloutConfig
from agentrl.config.section import Section
from agentrl.config.simulation import SimulationConfig
from agentrl.config.tracking import TrackingConfig
from agentrl.config.trainer import TrainerConfig


class Config(Section):
    """The config of a whole run."""

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
    simulation: SimulationConfig = SimulationConfig()

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models that this config names, by config key; the critic's is derived from `model`."""
        return {"model": self.model, "reward_model.model": self.reward_model.model}

    @property
    def learner_models(self) -> dict[str, ModelConfig]:
        """The models that ranks compute, by role."""
        models = {"actor": self.model}
        if self.has_critic:
            models["critic"] = self.critic_model
        if self.teacher_model is not None:
            models["teacher"] = self.teacher_model
        if self.reward_model.is_used:
            models["reward_model"] = self.reward_model.model
        return models

    @property
    def policy_mode(self) -> Literal["decoupled", "bypass", "on_policy"]:
        """`algorithm.mode` with auto resolved.

        It is on_policy without staleness and with one update per step, else decoupled.
        """
        if self.algorithm.mode != "auto":
            return self.algorithm.mode
        updates = self.learner.minibatches_per_step * self.learner.epochs_per_step
        return "on_policy" if self.buffer.max_staleness == 0 and updates == 1 else "decoupled"

    @property
    def has_greedy(self) -> bool:
        """Whether each group has a greedy attempt besides the sampled ones."""
        return self.rollout.greedy_baseline == "always" or "greedy" in self.algorithm.estimator.reads

    @property
    def attempts_per_group(self) -> int:
        """Attempts played per group, the greedy one included."""
        return self.rollout.group_size + self.has_greedy

    @property
    def num_ranks(self) -> dict[Role, int]:
        """The roles of this run, with the number of ranks (or servers) of each."""
        ranks: dict[Role, int] = {"actor": self.learner.world_size}
        if self.has_critic:
            ranks["critic"] = self.learner.world_size
        if self.reward_model.is_used:
            ranks["reward_model"] = self.reward_model.world_size
        if self.rollout.num_started:
            ranks["servers"] = self.rollout.num_started
        if num_frozen := sum(plan.rollout.num_started for plan in self.frozen_plans):
            ranks["frozen_servers"] = num_frozen
        return ranks

    @property
    def frozen_plans(self) -> tuple[FrozenPlan, ...]:
        """The servers that the run starts for frozen models: those of opponents, and those of a teacher
        unless the run only validates.
        """
        named: list[tuple[str, str, FrozenServersConfig]] = [
            (opponent_key(name), f"opponent_{name}", one) for name, one in self.agent.opponents.items()
        ]
        if not self.trainer.val_only:
            named.append((TEACHER_SERVERS, "teacher", self.algorithm.distillation.servers))
        return tuple(
            servers.plan(key, name, policy=self.model, rollout=self.rollout)
            for key, name, servers in named
            if servers.is_started
        )

    @property
    def algorithm_in_use(self) -> AlgorithmConfig:
        """`algorithm` with values that default to other sections resolved."""
        length = self.algorithm.constant_length or self.agent.max_response_tokens
        return self.algorithm.model_copy(update={"constant_length": length})

    @property
    def of_validation(self) -> Config:
        """This config, with `eval.tools` and `eval.rewards` in place of the tools and rewards of training."""
        agent, reward = self.agent, self.reward
        if self.eval.tools is not None:
            agent = agent.model_copy(update={"tools": self.eval.tools})
        if self.eval.rewards:
            replaced = {
                source
                for source in reward.sources
                if any(fnmatchcase(source, pattern) for pattern in self.eval.rewards)
            }
            sources = {
                source: name for source, name in reward.sources.items() if source not in replaced
            } | self.eval.rewards
            reward = reward.model_copy(update={"sources": sources, "custom_function": CustomFunctionConfig()})
        return (
            self
            if (agent, reward) == (self.agent, self.reward)
            else self.model_copy(update={"agent": agent, "reward": reward})
        )

    @property
    def has_critic(self) -> bool:
        """`critic.enabled` with None resolved."""
        return (
            "critic" in self.algorithm.estimator.reads if self.critic.enabled is None else self.critic.enabled
        )

    @property
    def critic_model(self) -> ModelConfig:
        """The critic's model: `model` overridden by `critic.model`."""
        own = self.critic.model
        base = {} if own.path is None else {"path": own.path, "revision": own.revision}
        return self.model.model_copy(
            update={**base, "tokenizer_path": self.model.tokenizer_path or self.model.path, "lora": own.lora}
        )

    @property
    def teacher_model(self) -> ModelConfig | None:
        """The teacher that ranks load: `model` with other weights and no adapter; or None.

        None also if the run only validates: nothing is learned from it.
        """
        own = self.algorithm.distillation
        if not own.teacher or self.trainer.val_only:
            return None
        changes = {"path": own.teacher, "revision": own.revision, "tokenizer_path": None}
        return self.model.model_copy(update={**changes, "lora": LoRAConfig()})

    @property
    def critic_epochs(self) -> int:
        """`critic.epochs_per_step` with None resolved."""
        return self.critic.epochs_per_step or self.learner.epochs_per_step

    @property
    def with_adapter_resolved(self) -> Config:
        """This config, with `rollout.weights.adapter=auto` replaced by `alone`, or by `merged` if something
        prevents it.
        """
        if self.rollout.weights.adapter != "auto":
            return self
        return self.with_adapter("alone" if self.why_merged is None else "merged")

    def with_adapter(self, adapter: Literal["merged", "alone"]) -> Config:
        """Return this config with another `rollout.weights.adapter`."""
        weights = self.rollout.weights.model_copy(update={"adapter": adapter})
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"weights": weights})})

    @property
    def why_merged(self) -> str | None:
        """The reason why the LoRA adapter cannot be published alone.

        None if nothing in the config prevents it.
        """
        rollout, lora = self.rollout, self.model.lora
        bound, copies = rollout.embedded.max_lora_rank, rollout.sglang.args.get("dp_size", 1)
        transport, is_sglang = rollout.weights.transport, rollout.backend == "sglang"
        objections = {
            "model.lora.rank=0: there is no adapter": lora.rank == 0,
            f"rollout.weights.transport={transport}: adapters are sent only by disk": (
                not rollout.weights.kind.sends_adapters
            ),
            f"rollout.weights.pause_mode={rollout.weights.pause_mode}: adapters can only change "
            "while no request runs, so it must be auto or abort": (
                rollout.weights.pause_mode not in ("auto", "abort")
            ),
            "tracking.baselines are whole models, which replace the base weights": bool(
                self.tracking.baselines
            ),
            "model.lora.target_modules contains lm_head, for which servers load no adapter": (
                "lm_head" in lora.target_modules
            ),
            f"rollout.embedded.max_lora_rank={bound} is below model.lora.rank={lora.rank}": (
                rollout.backend == "embedded" and rollout.num_started > 0 and lora.rank > bound
            ),
            "rollout.weights.verify compares checksums, and SGLang reports none for adapters": (
                is_sglang and rollout.weights.verify
            ),
            "rollout.sglang.args.device=cpu: SGLang pins the memory of adapters, which requires a GPU": (
                is_sglang and rollout.sglang.args.get("device") == "cpu"
            ),
            f"rollout.sglang.args.dp_size={copies}: SGLang loads adapters only with dp_size=1": (
                is_sglang and copies != 1
            ),
        }
        return next((why for why, holds in objections.items() if holds), None)

    @model_validator(mode="after")
    def _check_sources(self) -> Config:
        sources, learner = self.rollout.weights.sources, self.learner
        num_ranks = learner.fsdp.shard_size or learner.world_size
        if sources > num_ranks:
            key = "world_size" if learner.fsdp.shard_size is None else "fsdp.shard_size"
            raise ValueError(
                f"rollout.weights.sources={sources} is more than learner.{key}={num_ranks}, the ranks that "
                f"hold one copy of the model; use at most {num_ranks}"
            )
        return self

    @model_validator(mode="after")
    def _check_gateway(self) -> Config:
        gateway, num_actors = self.agent.gateway, self.rollout.num_actors
        if gateway.port and num_actors > gateway.num_ports and self.cluster.address is None:
            raise ValueError(
                f"agent.gateway.port={gateway.port} with rollout.num_actors={num_actors}: each rollout "
                f"process of a machine listens on a port of its own; use num_ports={num_actors}, or port=0"
            )
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> Config:
        if self.rollout.weights.adapter == "alone" and (why := self.why_merged) is not None:
            raise ValueError(f"rollout.weights.adapter=alone is impossible: {why}; use auto or merged")
        return self

    @model_validator(mode="after")
    def _check_roles(self) -> Config:
        """Refuse what adapters of roles cannot be combined with."""
        if self.critic.model.lora.roles or self.reward_model.model.lora.roles:
            raise ValueError(
                "model.lora.roles: only the policy speaks in conversations; remove roles elsewhere"
            )
        if not self.model.lora.roles:
            return self
        learner, weights = self.learner, self.rollout.weights
        objections = {
            f"learner.tensor_parallel={learner.tensor_parallel}": learner.tensor_parallel > 1,
            f"learner.sequence_parallel={learner.sequence_parallel}": learner.sequence_parallel > 1,
            "learner.shared_prefix=true": learner.shared_prefix is True,
            "learner.compile=true": learner.compile,
            "model.lora.target_modules with lm_head": "lm_head" in self.model.lora.target_modules,
            "rollout.weights.adapter=merged, because a merged model has one adapter": weights.adapter
            == "merged",
            f"more than {MAX_ADAPTERS - 1} roles on rollout.backend=embedded": (
                self.rollout.backend == "embedded" and len(self.model.lora.roles) >= MAX_ADAPTERS
            ),
        }
        if (what := next((name for name, holds in objections.items() if holds), None)) is not None:
            raise ValueError(f"model.lora.roles cannot be combined with {what}")
        if self.why_merged is not None:
            raise ValueError(
                "model.lora.roles needs servers that load adapters alone, which is impossible: "
                f"{self.why_merged}"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> Config:
        name, reads = self.algorithm.advantage, self.algorithm.estimator.reads
        if "critic" in reads and self.critic.enabled is False:
            raise ValueError(f"algorithm.advantage={name} needs a critic; remove critic.enabled=false")
        if self.critic.enabled and not reads & {"critic", "columns"}:
            raise ValueError(
                f"critic.enabled=true, but algorithm.advantage={name} uses no critic; use gae or gae_turn"
            )
        if self.has_critic and self.algorithm.distillation.replaces_rewards:
            raise ValueError(
                "algorithm.distillation.with_rewards=false leaves the critic nothing to predict; use an "
                "algorithm.advantage without a critic, such as grpo"
            )
        if self.algorithm.distillation.asks_servers and self.rollout.temperature != 1:
            raise ValueError(
                f"algorithm.distillation.servers, rollout.temperature={self.rollout.temperature:g}: servers "
                "score prompts at temperature 1; use temperature=1, or a teacher that the ranks load"
            )
        kl = self.algorithm.kl
        if kl.coefficient and kl.place == "reward" and self.algorithm.distillation.replaces_rewards:
            raise ValueError(
                "algorithm.distillation.with_rewards=false leaves no rewards to subtract the KL from; use "
                "algorithm.kl.place=loss"
            )
        if (
            self.has_critic
            and self.trainer.steps is not None
            and self.critic.warmup_steps >= self.trainer.steps
        ):
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves no step of "
                f"trainer.steps={self.trainer.steps} to train the policy; use fewer"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_prefix(self) -> Config:
        refuse_shared_prefix(self.model, self.learner)
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Config:
        refuse_impossible_layout(self.placement, self.num_ranks, self.cluster)
        pools = {role: self.placement.pool_of(role) for role in self.num_ranks}
        if self.rollout.colocated and "servers" in pools and pools["servers"] != pools["actor"]:
            raise ValueError(
                f"rollout.colocated=true, but the servers are in pool {pools['servers']} and the "
                f"learner is in {pools['actor']}; give both roles the same pool, or remove "
                "colocated"
            )
        self.profiler.nsight.refuse_absent(self.num_ranks)
        return self

    @property
    def needs_early_rewards(self) -> str | None:
        """The key that needs the rewards of a group when it is complete, before its batch is taken.

        None: no key does.
        """
        if self.buffer.drop_constant_groups:
            return "buffer.drop_constant_groups"
        return "data.curriculum.by_pass_rate" if self.data.curriculum.by_pass_rate else None

    @model_validator(mode="after")
    def _check_constant_groups(self) -> Config:
        if self.buffer.drop_constant_groups and self.attempts_per_group == 1:
            raise ValueError(
                "buffer.drop_constant_groups with rollout.group_size=1 would drop every group, "
                "because one attempt has no variance; use group_size>=2"
            )
        if (
            self.needs_early_rewards
            and self.reward.custom_function.path
            and self.reward.custom_function.scope == "batch"
        ):
            raise ValueError(
                f"{self.needs_early_rewards} needs rewards when a group is complete, but "
                "reward.custom_function.scope=batch scores attempts later; use scope=trajectory"
            )
        return self

    @property
    def asks_reward_model(self) -> tuple[str, ...]:
        """The keys that refer to the reward model."""
        terms = (
            f"reward.terms.{name}"
            for name, term in self.reward.terms.items()
            if (term.reward or name) == REWARD_MODEL
        )
        sources = (
            f"reward.sources.{source}" for source, name in self.reward.sources.items() if name == REWARD_MODEL
        )
        return (
            *terms,
            *sources,
            *(f"eval.rewards.{source}" for source, name in self.eval.rewards.items() if name == REWARD_MODEL),
        )

    @model_validator(mode="after")
    def _reward_model_is_asked(self) -> Config:
        asking = self.asks_reward_model
        if asking and not self.reward_model.is_used:
            raise ValueError(
                f"{asking[0]} uses the reward model, but reward_model.model.path is empty; set it to a "
                "folder or hub id"
            )
        if self.reward_model.is_used and not asking:
            raise ValueError(
                f"reward_model.model.path={self.reward_model.model.path!r} is not used by any "
                "reward; add a term, such as reward.terms.helpful={reward: reward_model}"
            )
        late = next(
            (
                name
                for name, term in self.reward.terms.items()
                if (term.reward or name) == REWARD_MODEL and term.timeout_s
            ),
            None,
        )
        if late is not None:
            raise ValueError(
                f"reward.terms.{late}.timeout_s: the reward model has its own deadlines; use "
                "reward_model.collective_timeout_s"
            )
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Config:
        if self.buffer.sampler == "in_order" and self.data.curriculum.by_pass_rate:
            raise ValueError(
                "buffer.sampler=in_order takes the same tasks for batch k in every run, but "
                "data.curriculum.by_pass_rate=true draws tasks depending on which attempts "
                "finished; remove one of the two"
            )
        return self

    def _check_stages(self) -> None:
        """Refuse a correction stage that has no effect in this policy mode."""
        mode, correction = self.policy_mode, self.algorithm.correction
        if mode != "decoupled" and correction.self_normalize:
            raise ValueError(
                "algorithm.correction.self_normalize needs importance weights, and with "
                f"algorithm.mode={mode} the loss has none; use algorithm.mode=decoupled"
            )
        if mode == "on_policy" and correction.has_comparison:
            stage = "reject" if correction.reject else "m2po_threshold"
            raise ValueError(
                f"algorithm.correction.{stage} compares the learner's log-probabilities with the "
                "server's, and algorithm.mode=on_policy does not compute them; use "
                "algorithm.mode=decoupled or bypass"
            )

    @model_validator(mode="after")
    def _check_across_groups(self) -> Config:
        updates = self.learner.minibatches_per_step * self.learner.epochs_per_step
        if self.algorithm.mode == "on_policy" and (self.buffer.max_staleness > 0 or updates > 1):
            raise ValueError(
                f"algorithm.mode=on_policy needs buffer.max_staleness=0 (is {self.buffer.max_staleness}) and "
                f"one update per step (is {updates}); use algorithm.mode=decoupled"
            )
        if self.tracking.token_ratios and self.policy_mode != "decoupled":
            raise ValueError(
                f"tracking.token_ratios=true needs algorithm.mode=decoupled (is {self.policy_mode}): "
                "otherwise the behavior policy is the proximal one, and each ratio is 1"
            )
        estimator = self.algorithm.estimator
        drawn = estimator.num_drawn(self.algorithm)
        if drawn > self.rollout.group_size:
            raise ValueError(
                f"algorithm.{estimator.draws}={drawn} exceeds rollout.group_size={self.rollout.group_size}: "
                f"{estimator.name} draws {drawn} attempts from a group"
            )
        if (
            self.rollout.group_size == 1
            and self.algorithm.singleton == "zero"
            and estimator.compares == "group"
            and not self.algorithm.distillation.replaces_rewards
        ):
            raise ValueError(
                f"rollout.group_size=1 with algorithm.advantage={estimator.name}: attempts are "
                "compared within their group, so every advantage is 0 and nothing is learned; "
                "use a larger group_size, algorithm.singleton=raw, or reinforce_plus_plus, remax "
                "or gae"
            )
        rollout = self.rollout
        if estimator.draws and rollout.shrinking_key and drawn > rollout.min_group_size:
            raise ValueError(
                f"algorithm.{estimator.draws}={drawn} exceeds "
                f"rollout.min_group_size={rollout.min_group_size}: {estimator.name} draws {drawn} attempts "
                f"from a group, and rollout.{rollout.shrinking_key} may leave fewer; use a larger "
                "min_group_size, or drop"
            )
        self._check_stages()
        if self.trainer.keep_best > 0 and (
            min(self.trainer.save_freq, self.trainer.test_freq) < 1 or not self.data.val_files
        ):
            raise ValueError(
                f"trainer.keep_best={self.trainer.keep_best} needs checkpoints and validations: "
                "set trainer.save_freq, trainer.test_freq and data.val_files"
            )
        if self.learner.minibatches_per_step > self.buffer.groups_per_step:
            raise ValueError(
                f"learner.minibatches_per_step={self.learner.minibatches_per_step} exceeds "
                f"buffer.groups_per_step={self.buffer.groups_per_step}: a minibatch needs at "
                "least one group"
            )
        return self
