"""Ray around the learner: one actor per rank, and the controller's handle of all of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from transformers.utils.logging import disable_progress_bar

from agentrl.config.schema import AlgorithmConfig, LearnerConfig, ModelConfig, ModelFromScratchConfig
from agentrl.errors import AgentRLError, LearnerError
from agentrl.learner.batch import Microbatch, ScoredMicrobatch
from agentrl.learner.counterfactual import Counterfactual
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.loss import Mode
from agentrl.learner.score_head import ScoreHead
from agentrl.types import TensorSpec

_GRACE_S = 5.0
"""A lost rank breaks the collective of the others, who may report first: so long the death itself is waited for."""


class LearnerRank:
    """One rank. Synchronous: calls run one after the other, in the order in which the group sent them; `finish_save` alone, which
    only waits, has a thread of its own."""

    def find_address(self) -> tuple[str, int]:
        """Return this host's address and a port that is free at this moment."""
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def pid(self) -> int:
        """Return the process id of this rank."""
        return os.getpid()

    def start(self, spec: LearnerSpec, rank: int, address: str, port: int) -> None:
        disable_progress_bar()
        self._learner = Learner(spec, rank=rank, address=address, port=port)

    def score(self, microbatches: list[Microbatch]) -> tuple[None, list[ScoredMicrobatch]]:
        # Two references: the driver waits for the first and never fetches the second.
        return None, self._learner.score(microbatches)

    def update(self, minibatch: list[ScoredMicrobatch]) -> dict[str, float]:
        return self._learner.update(minibatch)

    def supervised_update(self, microbatches: list[Microbatch]) -> dict[str, float]:
        return self._learner.supervised_update(microbatches)

    def measure(self, microbatches: list[Microbatch]) -> dict[str, float]:
        return self._learner.measure(microbatches)

    def parity_tokens(self) -> float:
        return self._learner.parity_tokens()

    def usage(self) -> dict[str, float]:
        return self._learner.usage()

    def start_trace(self) -> None:
        self._learner.start_trace()

    def write_trace(self, folder: str) -> None:
        self._learner.write_trace(folder)

    def compare(
        self, microbatches: list[Microbatch], reference: list[Microbatch], variants: Mapping[str, AlgorithmConfig]
    ) -> dict[str, Counterfactual]:
        return self._learner.compare(microbatches, reference, variants)

    def tensor_specs(self) -> list[TensorSpec]:
        return self._learner.tensor_specs()

    def checksums(self) -> dict[str, str]:
        return self._learner.checksums()

    def export(self, folder: str) -> None:
        self._learner.export(folder)

    def join_weights_group(self, address: str, port: int, world_size: int, name: str, backend: str) -> None:
        self._learner.join_weights_group(address, port, world_size, name, backend)

    def send_bucket(self, names: Sequence[str]) -> None:
        self._learner.send_bucket(names)

    def leave_weights_group(self) -> None:
        self._learner.leave_weights_group()

    def start_save(self, folder: str) -> None:
        self._learner.start_save(folder)

    @ray.method(concurrency_group="saving")
    def finish_save(self) -> None:
        self._learner.finish_save()

    def load(self, folder: str) -> None:
        self._learner.load(folder)


LearnerActor = ray.remote(num_cpus=0, concurrency_groups={"saving": 1})(LearnerRank)  # type: ignore[call-overload]  # not in ray's stubs


@dataclass(frozen=True, slots=True)
class ScoredMinibatch:
    """Scored microbatches that stay in Ray's object store: one reference per rank, and how many microbatches each has."""

    refs: tuple[ObjectRef, ...]
    num_microbatches: int


class LearnerGroup:
    """All ranks as one learner: every method runs on all of them and returns rank 0's answer.

    Every method raises LearnerError when a rank is lost, fails or does not answer in time; the group is of no use after that.
    The deadline of a call is `collective_timeout_s` per microbatch, and two more: each of them holds at least one collective,
    and a rank in a collective that takes longer gives up by itself.
    """

    def __init__(self, actors: Sequence[ActorHandle], *, timeout_s: float, backend: str) -> None:
        self._actors = tuple(actors)
        self._timeout_s = timeout_s
        self.backend = backend

    @classmethod
    def start(
        cls,
        model: ModelConfig,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        temperature: float,
        total_updates: int,
        mode: Mode = "on_policy",
        dump_folder: str | None = None,
        from_scratch: ModelFromScratchConfig | None = None,
        gpus_per_learner: float = 0.0,
        score_head: ScoreHead | None = None,
    ) -> LearnerGroup:
        """Start `learner.world_size` ranks and wait until the model stands on all of them.

        Raises:
            ConfigError: the model, device or attention cannot be had.
            LearnerError: the ranks did not come together.
        """
        if learner.device == "auto":
            learner = learner.model_copy(update={"device": "cuda" if gpus_per_learner > 0 else "cpu"})
        spec = LearnerSpec(
            model, learner, algorithm, mode, seed, temperature, total_updates, dump_folder, from_scratch, score_head=score_head
        )
        actors: list[Any] = [LearnerActor.options(num_gpus=gpus_per_learner).remote() for _ in range(learner.world_size)]
        backend = "gloo" if learner.device == "cpu" else "nccl"
        group = cls(actors, timeout_s=learner.collective_timeout_s, backend=backend)
        try:
            address, port = group.open_rendezvous()
            group._run("start", lambda actor, rank: actor.start.remote(spec, rank, address, port))
        except AgentRLError:
            group.stop()
            raise
        return group

    def stop(self) -> None:
        """End all ranks at once."""
        for actor in self._actors:
            ray.kill(actor)

    # ------------------------------------------------------------------------------------------------------ learn

    def score(self, shards: Sequence[list[Microbatch]]) -> ScoredMinibatch:
        """Score the microbatches of each rank (see `pack`); what comes out stays with the ranks."""
        inputs = [ray.put(shard) for shard in shards]
        pairs: list[list[ObjectRef]] = [
            actor.score.options(num_returns=2).remote(shard) for actor, shard in zip(self._actors, inputs, strict=True)
        ]
        num_microbatches = len(shards[0])
        self._wait("score", [done for done, _ in pairs], num_microbatches)
        return ScoredMinibatch(tuple(scored for _, scored in pairs), num_microbatches)

    def update(self, minibatch: ScoredMinibatch) -> dict[str, float]:
        """Make one optimizer update and return its metrics (see `Learner.update`)."""
        refs, num_microbatches = minibatch.refs, minibatch.num_microbatches
        return self._run("update", lambda actor, rank: actor.update.remote(refs[rank]), num_microbatches)

    def supervised_update(self, shards: Sequence[list[Microbatch]]) -> dict[str, float]:
        """Make one supervised update of the microbatches of each rank and return its metrics."""
        inputs = [ray.put(shard) for shard in shards]
        return self._run("supervised_update", lambda actor, rank: actor.supervised_update.remote(inputs[rank]), len(shards[0]))

    def measure(self, shards: Sequence[list[Microbatch]]) -> dict[str, float]:
        """Return the supervised loss of the microbatches of each rank, without learning from them."""
        inputs = [ray.put(shard) for shard in shards]
        return self._run("measure", lambda actor, rank: actor.measure.remote(inputs[rank]), len(shards[0]))

    def usage(self) -> dict[str, float]:
        """Return what scoring and updating took since the last call: time, tokens, memory (see `Meter.finish`)."""
        return self._run("usage", lambda actor, rank: actor.usage.remote())

    @contextmanager
    def traced(self, folder: str) -> Iterator[None]:
        """Record the block on all ranks with torch's profiler; the traces are written into `folder` on each rank's host."""
        self._run("start_trace", lambda actor, rank: actor.start_trace.remote())
        yield
        self._run("write_trace", lambda actor, rank: actor.write_trace.remote(folder))

    @cached_property
    def parity_tokens(self) -> float:
        """What `pack` weighs attention by, of the policy's sizes."""
        return self._run("parity_tokens", lambda actor, rank: actor.parity_tokens.remote())

    def compare(
        self, shards: Sequence[list[Microbatch]], reference: Sequence[list[Microbatch]], variants: Mapping[str, AlgorithmConfig]
    ) -> dict[str, Counterfactual]:
        """Return what each of `variants` would make of an update of `shards`; nothing changes."""
        pairs = [(ray.put(own), ray.put(on_policy)) for own, on_policy in zip(shards, reference, strict=True)]
        num_microbatches = (len(variants) + 1) * (len(shards[0]) + len(reference[0]))
        return self._run("compare", lambda actor, rank: actor.compare.remote(*pairs[rank], variants), num_microbatches)

    # ---------------------------------------------------------------------------------------------------- weights

    def open_rendezvous(self) -> tuple[str, int]:
        """Return a free (address, port) of the host of rank 0."""
        ref: ObjectRef = self._actors[0].find_address.remote()
        self._wait("find_address", [ref], 0)
        return ray.get(ref)

    def tensor_specs(self) -> list[TensorSpec]:
        """Return the published weights (see `Learner.tensor_specs`)."""
        return self._run("tensor_specs", lambda actor, rank: actor.tensor_specs.remote())

    def checksums(self) -> Mapping[str, str]:
        """Return checksums of the published weights."""
        return self._run("checksums", lambda actor, rank: actor.checksums.remote())

    def export(self, folder: str) -> None:
        """Write the policy in Hugging Face format into `folder`, on the host of rank 0."""
        self._run("export", lambda actor, rank: actor.export.remote(folder))

    def join_weights_group(self, address: str, port: int, world_size: int, name: str, backend: str) -> None:
        """Open the process group to the servers; blocks until they have come."""
        self._run("join_weights_group", lambda actor, rank: actor.join_weights_group.remote(address, port, world_size, name, backend))

    def send_bucket(self, names: Sequence[str]) -> None:
        """Send the named weights through the process group."""
        self._run("send_bucket", lambda actor, rank: actor.send_bucket.remote(list(names)))

    def leave_weights_group(self) -> None:
        """Close the process group to the servers."""
        self._run("leave_weights_group", lambda actor, rank: actor.leave_weights_group.remote())

    # ------------------------------------------------------------------------------------------------ checkpoints

    def start_save(self, folder: str) -> None:
        """Copy the learner's state and begin to write the copy into `folder`, which all ranks reach."""
        self._run("start_save", lambda actor, rank: actor.start_save.remote(folder))

    def finish_save(self) -> None:
        """Wait until it is written; may be called by another thread than all else."""
        self._run("finish_save", lambda actor, rank: actor.finish_save.remote())

    def save(self, folder: str) -> None:
        """Write the learner's state into `folder`, which all ranks reach."""
        self.start_save(folder)
        self.finish_save()

    def load(self, folder: str) -> None:
        """Read the learner's state from `folder`."""
        self._run("load", lambda actor, rank: actor.load.remote(folder))

    # ----------------------------------------------------------------------------------------------------- private

    def _run(self, what: str, call: _Call, num_microbatches: int = 0) -> Any:
        refs = [call(actor, rank) for rank, actor in enumerate(self._actors)]
        self._wait(what, refs, num_microbatches)
        return ray.get(refs[0])

    def _wait(self, what: str, refs: Sequence[ObjectRef], num_microbatches: int) -> None:
        """Wait for one reference per rank; the first failure ends the wait."""
        deadline = time.monotonic() + self._timeout_s * (num_microbatches + 2)
        pending: dict[ObjectRef, int] = {ref: rank for rank, ref in enumerate(refs)}
        while pending:
            done, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                ranks = ", ".join(str(rank) for rank in pending.values())
                raise LearnerError(
                    f"learner rank {ranks} did not finish {what!r} in time (learner.collective_timeout_s={self._timeout_s:g})"
                )
            rank = pending.pop(done[0])
            try:
                ray.get(done[0])
            except RayActorError as error:
                raise _lost(rank, what) from error
            except RayTaskError as error:
                if isinstance(error.cause, AgentRLError) and not isinstance(error.cause, LearnerError):
                    raise error.cause from None
                self._raise_if_lost(what, pending)
                raise LearnerError(f"learner rank {rank} failed in {what!r}: {error.cause!r}") from error

    def _raise_if_lost(self, what: str, pending: Mapping[ObjectRef, int]) -> None:
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_GRACE_S) if pending else ([], [])
        for ref in done:
            try:
                ray.get(ref)
            except RayActorError as error:
                raise _lost(pending[ref], what) from error
            except RayTaskError:
                continue  # it failed as the first one did


_Call = Callable[[ActorHandle, int], ObjectRef]


def _lost(rank: int, what: str) -> LearnerError:
    return LearnerError(f"learner rank {rank} was lost during {what!r}: resume from the last checkpoint")
