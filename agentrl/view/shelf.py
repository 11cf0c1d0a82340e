"""What a view keeps of one source: its readers, and what they have read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.view.attempt import AttemptReader
from agentrl.view.attempts import AttemptTable
from agentrl.view.run import RunReader
from agentrl.view.sources import ViewSource
from agentrl.view.token_texts import TokenTexts, find_tokenizer


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

    def texts(self) -> TokenTexts | None:
        """Return the tokens' texts; None if the run's tokenizer is not here."""
        if self._texts is None:
            folder = self.tokenizer or find_tokenizer(self.source.folder)
            self._texts = None if folder is None else TokenTexts.load(folder)
        return self._texts
