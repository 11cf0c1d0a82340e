"""The attempts of groups: their facts, in the journal and in a checkpoint, and their trajectories' files.

The facts are only read for a batch. In memory there is one path per attempt, to know when nothing refers to a
file any more: it is removed then.
"""

from __future__ import annotations

import json
import math
import operator
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

from agentrl.buffer.journal import AttemptKey, Journal
from agentrl.buffer.samplers import ReadyGroup
from agentrl.data.attempt_facts import AttemptFacts, ConversationCredit
from agentrl.data.attempt_files import TrajectoryRef, remove_files, remove_others
from agentrl.errors import CheckpointError
from agentrl.types import SCORED_OUTCOMES

CLOSE_TIMEOUT_S = 60.0
ROUNDING = 1e-12
"""Relative tolerance for equal rewards in a group: 0.1 + 0.2 equals 0.3."""


class StoredFacts(Sequence[AttemptFacts]):
    """Facts of attempts as they are stored. Who looks at them first decodes them: not the buffer, for which
    others wait.
    """

    def __init__(self, stored: Sequence[bytes], folder: Path) -> None:
        """folder: of the trajectories' files."""
        self._stored = stored
        self._folder = folder

    @overload
    def __getitem__(self, index: int) -> AttemptFacts: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttemptFacts]: ...
    def __getitem__(self, index: int | slice) -> AttemptFacts | list[AttemptFacts]:
        return self._decoded[index]

    def __len__(self) -> int:
        return len(self._stored)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredFacts, (self._stored, self._folder)

    @cached_property
    def _decoded(self) -> list[AttemptFacts]:
        return [AttemptFacts.from_json(data, self._folder) for data in self._stored]


class Rows:
    """The stored attempts, by group, owner and member."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        """folder: of the trajectories' files."""
        self._journal = journal
        self._folder = folder
        self._arriving: dict[AttemptKey, AttemptFacts] = {}
        self._paths: dict[int, dict[tuple[str, int], str]] = {}  # group -> (owner, member) -> file
        self._uses: Counter[str] = Counter()  # file -> attempts stored in it
        # Removing a thousand files takes a while, and nothing waits for it.
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="remove-attempts")
        self._unsure: set[str] = set()  # files that may hold no stored attempt
        self._batches: dict[int, set[str]] = {}  # step -> files that its ranks and the recorder read
        for group_id, owner in journal.plays():
            stored = journal.attempts(group_id, owner).items()
            self.keep({(group_id, owner, m): AttemptFacts.from_json(data, folder) for m, data in stored})

    @property
    def num_stored(self) -> int:
        """Number of stored attempts."""
        return sum(len(own) for own in self._paths.values())

    # -------------------------------------------------------------------------------------------------- write

    def announce(self, key: AttemptKey, attempt: AttemptFacts) -> None:
        """Remember an attempt, to be written together with the next events."""
        self._arriving[key] = attempt

    def take_arriving(self) -> dict[AttemptKey, AttemptFacts]:
        """Return and clear the attempts announced since the last call."""
        arriving, self._arriving = self._arriving, {}
        return arriving

    def keep(self, attempts: Mapping[AttemptKey, AttemptFacts]) -> None:
        """Note that these attempts are in the journal now."""
        for (group_id, owner, member), attempt in attempts.items():
            own, path = self._paths.setdefault(group_id, {}), _path(attempt)
            former = own.get((owner, member))
            own[owner, member] = path
            self._uses[path] += 1
            if former is not None:
                self._let_go([former])

    def discard(self, attempts: Mapping[AttemptKey, AttemptFacts]) -> None:
        """Note that these attempts were not stored."""
        self._unsure.update(_path(attempt) for attempt in attempts.values())

    # --------------------------------------------------------------------------------------------------- read

    def of(self, groups: Iterable[ReadyGroup]) -> StoredFacts:
        """Return the facts of ready groups' attempts, by group and member."""
        return StoredFacts(self.stored(groups), self._folder)

    def stored(self, groups: Iterable[ReadyGroup]) -> list[bytes]:
        """Return the same as it is stored, for a checkpoint (see `write_state`)."""
        return self._journal.read((g.group_id, g.owner, m) for g in groups for m in g.members)

    def is_constant(self, group: ReadyGroup, credit: ConversationCredit = "attempt") -> bool:
        """Return whether everything that credit compares in a ready group has the same reward: the attempts
        that did not fail, or their conversations of one name.
        """
        compared: dict[str, list[float]] = {}
        for attempt in self.of([group]):
            if attempt.outcome in SCORED_OUTCOMES:
                for name, reward in attempt.compared_rewards(credit):
                    compared.setdefault(name, []).append(reward)
        return all(math.isclose(min(own), max(own), rel_tol=ROUNDING) for own in compared.values())

    def has(self, group: ReadyGroup) -> bool:
        """Return whether all attempts of the group are stored, with their files."""
        own = self._paths.get(group.group_id, {})
        paths = [own.get((group.owner, member)) for member in group.members]
        return all(path is not None and Path(path).is_file() for path in paths)

    # ------------------------------------------------------------------------------------------------- forget

    def forget_others(self, group: ReadyGroup) -> None:
        """Delete the attempts of a ready group that came from other owners."""
        self._journal.forget_others(group.group_id, group.owner)
        self._drop(group.group_id, partial(operator.ne, group.owner))

    def forget_plays(self, plays: Collection[tuple[str, int]]) -> None:
        """Delete the attempts of the given (owner, group id) pairs."""
        if plays:
            self._journal.forget_plays((group_id, owner) for owner, group_id in plays)
        for owner, group_id in plays:
            self._drop(group_id, partial(operator.eq, owner))

    def forget(self, group_ids: Collection[int]) -> None:
        """Delete all attempts of the given groups."""
        if group_ids:
            self._journal.forget(group_ids)
        for group_id in group_ids:
            self._drop(group_id, lambda _: True)

    def _drop(self, group_id: int, is_dropped: Callable[[str], bool]) -> None:
        own = self._paths.get(group_id, {})
        gone = {key: path for key, path in own.items() if is_dropped(key[0])}
        for key in gone:
            del own[key]
        if not own:
            self._paths.pop(group_id, None)
        self._let_go(gone.values())

    def _let_go(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._uses[path] -= 1
            self._unsure.add(path)

    def remove_unused(self) -> None:
        """Remove the files of which no attempt is stored any more.

        Only between calls: within one, a file may hold an attempt that is about to be stored.
        """
        read = set().union(*self._batches.values())
        unused = [path for path in self._unsure if self._uses[path] <= 0 and path not in read]
        self._unsure.clear()
        for path in unused:
            del self._uses[path]
        if unused:
            self._remover.submit(remove_files, unused)

    def hold_batch(self, step: int, groups: Iterable[ReadyGroup]) -> None:
        """Keep the files of a batch until `release_batches`, even if its attempts are forgotten before."""
        own = self._batches.setdefault(step, set())
        own |= {self._paths[g.group_id][g.owner, member] for g in groups for member in g.members}

    def release_batches(self, before: int) -> None:
        """Nobody reads the batches of earlier steps any more."""
        for step in [step for step in self._batches if step < before]:
            self._unsure |= self._batches.pop(step)

    def spare_unused(self) -> None:
        """Do not remove them: a call failed, and will be repeated with the same files."""
        self._unsure.clear()

    def remove_strays(self) -> None:
        """Remove the files that belong to no stored attempt. Only while no rollout actor is alive."""
        remove_others(self._folder, self._uses)

    def close(self) -> None:
        """Wait until the files that nothing refers to are removed."""
        self._remover.submit(remove_files, ()).result(CLOSE_TIMEOUT_S)

    # --------------------------------------------------------------------------------------------- checkpoint

    def write_state(self, state: Mapping[str, Any], stored: Sequence[bytes]) -> bytes:
        """Return a checkpoint of the buffer: the ledger's state, and the facts of ready groups' attempts."""
        attempts = [data.decode() for data in stored]
        return json.dumps({**state, "folder": str(self._folder), "attempts": attempts}).encode()

    def read_state(
        self, data: bytes, *, group_size: int
    ) -> tuple[dict[str, Any], dict[AttemptKey, AttemptFacts], int]:
        """Return what `write_state` wrote: the ledger's state, the attempts of its ready groups, and how many
        groups of another size there were.

        Files of another folder are copied into this one. A group whose files are gone, or that was played
        with another `group_size`, is not ready any more: its task is played again.

        Raises:
            CheckpointError: the bytes are not a valid state.
        """
        try:
            state = json.loads(data)
            folder, stored = Path(state.pop("folder")), state.pop("attempts")
            attempts = [AttemptFacts.from_json(one.encode(), folder) for one in stored]
        except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
            raise CheckpointError(f"the buffer's state cannot be read: {error!r}") from error
        here: dict[int, list[AttemptFacts]] = {}
        for attempt in attempts:
            if (found := self._brought_here(attempt)) is not None:
                here.setdefault(attempt.group_id, []).append(found)
        is_other_size = state.pop("group_size", group_size) != group_size
        gone = [
            group
            for group in state["ready"]
            if is_other_size or len(here.get(group["group_id"], ())) < len(group["members"])
        ]
        lost = {group["group_id"] for group in gone}
        state["ready"] = [group for group in state["ready"] if group["group_id"] not in lost]
        state["open"] += [[group["group_id"], group["number"], len(group["members"])] for group in gone]
        owners = {group["group_id"]: group["owner"] for group in state["ready"]}
        kept = (t for group_id, own in here.items() if group_id in owners for t in own)
        ready = {(t.group_id, owners[t.group_id], t.member): t for t in kept}
        return state, ready, len(gone) if is_other_size else 0

    def _brought_here(self, attempt: AttemptFacts) -> AttemptFacts | None:
        """Return the attempt with its file in this folder; None if the file does not exist."""
        assert isinstance(attempt.source, TrajectoryRef)
        source, target = Path(attempt.source.path), self._folder / Path(attempt.source.path).name
        if not target.is_file():
            if not source.is_file():
                return None
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        place = attempt.source
        moved = TrajectoryRef(str(target), place.offset, place.num_bytes, place.checksum)
        return attempt.replace(source=moved)


def _path(attempt: AttemptFacts) -> str:
    assert isinstance(attempt.source, TrajectoryRef), "the buffer stores where a trajectory is"
    return attempt.source.path
