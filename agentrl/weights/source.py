"""Who holds the weights, as a publish sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.types import SendTimes, TensorSpec


class WeightSource(Protocol):
    """The learner's verbs. All calls block, run in worker threads, and come one at a time."""

    def export(self, folder: str) -> None: ...

    def write_base(self, folder: str, is_again: bool) -> None:
        """Export, and keep a copy to tell changes by; again: the weights that `write_changes` wrote last, whole."""

    def write_changes(self, folder: str) -> tuple[int, int]:
        """Write what changed since the last weights written; return bytes of the changed elements, and of the tensors they are in."""

    def export_adapter(self, folder: str) -> None: ...

    def tensor_specs(self) -> Sequence[TensorSpec]: ...

    def adapter_specs(self) -> Sequence[TensorSpec]: ...

    def open_rendezvous(self) -> tuple[str, int]:
        """Return a free (address, port) of the host of rank 0, reachable by the servers."""

    def join_weights_group(self, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Become rank 0 of the group; `timeout_s` bounds its forming and each broadcast in it."""

    def send_bucket(self, names: Sequence[str]) -> None:
        """Gather the named weights and begin to broadcast them; the one before has arrived by then."""

    def finish_buckets(self) -> SendTimes:
        """Wait until the last bucket has arrived; return what all since the last call took."""

    def pickle_bucket(self, names: Sequence[str]) -> str:
        """Return the named weights as SGLang's `tensor` update takes them: pickled, in base64."""

    def leave_weights_group(self) -> None: ...

    def checksums(self, dtype: str | None, is_fused: bool) -> Mapping[str, str]:
        """Return {name: sha256 of the published weight in `dtype`, or as published}; fused: see `learner.checksums`."""

    def score(self, token_ids: Sequence[int], num_context: int) -> Sequence[float]:
        """Return the policy's log-probability of each token behind the first `num_context`, at the rollout's temperature."""

    def adapter_checksums(self) -> Mapping[str, str]: ...
