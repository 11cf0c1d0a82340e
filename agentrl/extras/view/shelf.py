"""What a view keeps of one source: its readers, and what they have read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.data.proximal_files import FOLDER, read_proximal
from agentrl.extras.view.attempt import MAX_TOKENS, AttemptReader, ReadAttempt, ShownTokens, show_tokens
from agentrl.extras.view.attempts import AttemptTable
from agentrl.extras.view.run import RunReader
from agentrl.extras.view.sources import AttemptFile, ViewSource
from agentrl.extras.view.token_texts import TokenTexts, find_tokenizer
from agentrl.types import Trajectory


@dataclass(slots=True)
class Shelf:
    """A source with its readers.

    tokenizer: its folder; None: the run's own. advantages: of the file that was last asked for, by its name.
    """

    source: ViewSource
    table: AttemptTable
    attempts: AttemptReader
    run: RunReader
    tokenizer: Path | None = None
    advantages: dict[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    _texts: TokenTexts | None = None

    @classmethod
    def of(cls, source: ViewSource, tokenizer: Path | None) -> Shelf:
        return cls(source, AttemptTable(source), AttemptReader(source), RunReader(source), tokenizer)

    def tokens(
        self,
        stored: ReadAttempt,
        *,
        start: int = 0,
        count: int = MAX_TOKENS,
        advantages: Sequence[float] | None = None,
    ) -> ShownTokens:
        """Return tokens of an attempt that has some, from `start` on, at most MAX_TOKENS."""
        assert stored.trajectory is not None, "only the report of its failure was kept"
        return show_tokens(
            stored.trajectory,
            self.texts(),
            start=start,
            count=count,
            advantages=advantages,
            proximal=self._proximal(stored.trajectory, stored.file),
        )

    def _proximal(self, own: Trajectory, file: AttemptFile) -> NDArray[np.float32] | None:
        if self.source.kind != "run" or file.set != "training" or file.step is None:
            return None
        return read_proximal(
            self.source.root / FOLDER,
            step=file.step,
            group=own.group_id,
            member=own.member,
            num_actions=own.num_action_tokens,
        )

    def texts(self) -> TokenTexts | None:
        """Return the tokens' texts; None if the run's tokenizer is not here."""
        if self._texts is None:
            folder = self.tokenizer or find_tokenizer(self.source.folder)
            self._texts = None if folder is None else TokenTexts.load(folder)
        return self._texts
