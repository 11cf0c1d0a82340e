"""What servers, ranks, networks and disks take, from the sizes of a model and the data sheet of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.model_flops import ModelFlops
from agentrl.config.model_size import ModelSize
from agentrl.config.schema import Config
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import ConfigError
from agentrl.extras.plan.engine import ServerSpeed
from agentrl.extras.plan.gpus import GPUS
from agentrl.extras.plan.model_presets import PRESETS, known_size, preset

WIDTH = 2
"""Bytes of a weight on a server."""
_STATE = 12
"""Bytes of a parameter in a checkpoint: weight and two moments in float32."""
_SAVE_STOPS_S = 1.0


def model_size(config: Config) -> ModelSize:
    """Return the size of the policy.

    Raises:
        ConfigError: it is not known.
    """
    name = config.simulation.model
    size = known_size(config.model.path) if name is None else preset(name)
    if size is None:
        what = f"model.path={config.model.path!r} has no config.json of a known architecture"
        if name is not None:
            what = f"simulation.model={name!r} is not known"
        raise ConfigError(f"{what}; set simulation.model to one of {', '.join(PRESETS)}")
    return size


def find_size(config: Config) -> ModelSize | None:
    """Return the size of the policy; None if both sides are paced and no model is named.

    Raises:
        ConfigError: it is not known.
    """
    own = config.simulation
    is_paced = own.server.seconds_per_token is not None and own.learner.tokens_per_s is not None
    return None if is_paced and own.model is None else model_size(config)


def server_speed(config: Config, size: ModelSize | None, *, grain: int) -> ServerSpeed:
    """Return the speed of a server, in tokens of the simulation. `size` is not needed for a paced server.

    Raises:
        ConfigError: the model leaves no room for a KV cache.
    """
    own, gpu = config.simulation.server, GPUS[config.simulation.gpu]
    pace_s = own.seconds_per_token
    if pace_s is not None or size is None:
        assert pace_s is not None, "the size of a model that is computed is known"
        crowd_s = own.seconds_per_running
        return ServerSpeed(lambda batch: grain * (pace_s + crowd_s * batch), max_running=own.max_running)
    read = own.gpus * gpu.bytes_per_s * own.bandwidth_share
    compute = own.gpus * gpu.flops_per_s * own.compute_share
    kv_bytes = WIDTH * size.kv_values_per_token
    weights = WIDTH * size.num_parameters
    room = own.gpus * gpu.memory_gb * 1e9 * own.memory_share - weights
    if room < kv_bytes * grain:
        raise ConfigError(
            f"simulation.server.gpus={own.gpus}: {weights / 1e9:,.0f} GB of weights leave no room for a KV "
            f"cache on {own.gpus} x {config.simulation.gpu}; use more GPUs per server"
        )

    def base_s(batch: int) -> float:
        reads = WIDTH * _parameters_read(size, batch) / read
        computes = 2 * size.num_matrix_parameters * batch / compute
        return grain * (own.tick_s + max(reads, computes))

    return ServerSpeed(
        base_s,
        kv_s=grain * grain * kv_bytes / read,
        prefill_s=grain * 2 * size.num_active_parameters / compute,
        max_running=own.max_running,
        kv_tokens=room / kv_bytes / grain,
    )


def _parameters_read(size: ModelSize, batch: int) -> float:
    """Return the weights that one tick of `batch` requests reads: of experts, those that were chosen."""
    if size.experts is None:
        return size.num_matrix_parameters
    experts = size.experts
    idle = (1 - experts.per_token / experts.num) ** batch
    of_experts = 3 * size.hidden_size * experts.width * experts.num * size.num_expert_layers
    return size.num_layer_parameters - of_experts * idle + size.num_head_parameters


@dataclass(frozen=True)
class Costs:
    """Times of the learner's side: `agentrl.extras.plan.loop.LoopCosts`. `size` None: both sides are
    paced.
    """

    config: Config
    size: ModelSize | None
    grain: int

    def take_s(self, batch: Sequence[AttemptFacts]) -> float:
        num_tokens = self.grain * sum(attempt.num_tokens for attempt in batch)
        return num_tokens * self.config.simulation.learner.driver_us_per_token * 1e-6

    def learn_s(self, batch: Sequence[AttemptFacts]) -> float:
        trained = [attempt for attempt in batch if not attempt.is_greedy]
        lengths = [self.grain * attempt.num_tokens for attempt in trained]
        return self.update_s(lengths, self.grain * sum(attempt.num_action_tokens for attempt in trained))

    def update_s(self, lengths: Sequence[int], scored: int) -> float:
        """Return the time of the ranks for attempts of these lengths, with so many sampled tokens in all."""
        own = self.config.simulation.learner
        if own.tokens_per_s is not None or self.size is None:
            assert own.tokens_per_s is not None, "the size of a model that is computed is known"
            return scored / own.tokens_per_s
        flops = ModelFlops(self.size, self.config.model.lora)
        forward = flops.forward(lengths, num_scored=scored)
        update = flops.update(lengths, num_scored=scored)
        num_forwards = (self.config.policy_mode == "decoupled") + (self.config.algorithm.kl.coefficient > 0)
        total = num_forwards * forward + self.config.learner.epochs_per_step * update
        total += self._teaching(lengths, scored, forward)
        if self.config.has_critic:
            total += forward + self.config.critic_epochs * update
        speed = self.config.learner.world_size * GPUS[self.config.simulation.gpu].flops_per_s * own.mfu
        return total / speed

    def _teaching(self, lengths: Sequence[int], num_scored: int, forward: int) -> int:
        """Return the operations of distillation: a forward of the teacher and, except in mode bypass, another
        one of the policy.
        """
        teacher = self.config.teacher_model
        size = None if teacher is None else ModelSize.read(teacher.path) or self.size
        if size is None:
            return 0
        own = 0 if self.config.policy_mode == "bypass" else forward
        return own + ModelFlops(size).forward(lengths, num_scored=num_scored)

    def send_s(self) -> float:
        """Return the time before a publish pauses servers: with a folder, the ranks write it."""
        is_on_disk = self.config.rollout.weights.kind.is_on_disk
        return self._weight_bytes / self._disk if is_on_disk else 0.0

    def load_s(self) -> float:
        own = self.config.simulation
        if self.config.rollout.weights.kind.is_on_disk:
            seconds = self._weight_bytes * self.config.rollout.num_started / self._disk
        else:
            seconds = self._weight_bytes / (own.network_gb_s * 1e9)
        return own.publish_s + seconds

    def save_s(self) -> tuple[float, float]:
        state = 0.0 if self.size is None else _STATE * self.size.num_parameters
        return _SAVE_STOPS_S, state / self._disk

    def restart_s(self) -> float:
        return self.config.simulation.restart_s

    @property
    def _weight_bytes(self) -> float:
        return 0.0 if self.size is None else float(WIDTH * self.size.num_parameters)

    @property
    def _disk(self) -> float:
        return self.config.simulation.disk_gb_s * 1e9
