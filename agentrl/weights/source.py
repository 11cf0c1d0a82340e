"""The owner of the weights, as a publish sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.types import SendTimes, TensorSpec


class WeightSource(Protocol):
    """The learner's operations. All calls block, run in worker threads, and are made one at a time."""

    def export(self, folder: str) -> None: ...

    def write_base(self, folder: str, is_again: bool) -> None:
        """Export all weights and keep a copy to find later changes.

        is_again: write the weights of the last `write_changes` again, as a whole model.
        """

    def write_changes(self, folder: str) -> tuple[int, int]:
        """Write what changed since the last weights written.

        Returns the bytes of the file of changed elements, and of the file of the tensors that contain them.
        """

    def export_adapter(self, folder: str) -> None: ...

    def tensor_specs(self) -> Sequence[TensorSpec]: ...

    def adapter_specs(self) -> Sequence[TensorSpec]: ...

    def open_rendezvous(self) -> tuple[str, int]:
        """Return a free (address, port) on the host of rank 0, reachable by the servers."""

    def join_weights_group(self, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Join the group as rank 0; `timeout_s` limits the forming of the group and each broadcast."""

    def send_bucket(self, names: Sequence[str]) -> None:
        """Gather the named weights and start broadcasting them. The previous bucket has arrived by then."""

    def finish_buckets(self) -> SendTimes:
        """Wait until the last bucket has arrived; return the times of all buckets since the last call."""

    def pickle_bucket(self, names: Sequence[str]) -> str:
        """Return the named weights in the format of SGLang's `tensor` update: pickled, in base64."""

    def leave_weights_group(self) -> None: ...

    def checksums(self, dtype: str | None, is_fused: bool) -> Mapping[str, str]:
        """Return {name: sha256 of the published weight}, cast to `dtype` if given.

        is_fused: see `learner.checksums`.
        """

    def score(self, token_ids: Sequence[int], num_context: int) -> Sequence[float]:
        """Return the policy's log-probabilities of all tokens but the first `num_context`.

        At the rollout's temperature.
        """

    def adapter_checksums(self) -> Mapping[str, str]: ...
