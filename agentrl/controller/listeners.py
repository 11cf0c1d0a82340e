"""`RunListener`: what a run tells others, so that a feature is a file and not a line of the loop.

A package registers a listener in `agentrl.listeners`: name -> `f(config: Config, run_dir: RunDir)`, which
returns a RunListener, or None for a run that does not need it. It is called after the config was checked and
before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentrl.config.schema import Config
from agentrl.controller.run_dir import RunDir
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import AgentRLError, PluginError
from agentrl.plugins.blame import failure_of
from agentrl.registered import Registered, registered
from agentrl.tracking.attempts import AttemptCounts
from agentrl.types import Group, Lags

if TYPE_CHECKING:
    from agentrl.controller.observe import Observer
    from agentrl.controller.run import Run

GROUP = "agentrl.listeners"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """A run whose folder and console are open; no process has started.

    resumed_at: the step of the checkpoint that the run resumes from; None: it begins.
    needed: returns the files of the run folder that a resume after a step needs, beside its checkpoint.
    """

    observer: Observer
    resumed_at: int | None
    needed: Callable[[int], Sequence[Path]]


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A batch that was learned from, and what the rollout actors counted since the start of the run.

    step: number of steps made, with this one.
    learned_by: version of the weights that were trained on `groups`; `lags` returns how old a token was then.
    version: published after the step.
    """

    step: int
    learned_by: int
    lags: Lags
    version: int
    groups: Sequence[Group[AttemptFacts]]
    updates: Sequence[Mapping[str, float]]
    rollout_stats: Mapping[str, float] = field(default_factory=dict)
    buffer_stats: Mapping[str, float] = field(default_factory=dict)
    curriculum: Mapping[str, float] = field(default_factory=dict)

    @property
    def attempts(self) -> list[AttemptFacts]:
        """The attempts that were learned from."""
        return [attempt for group in self.groups for attempt in group.trajectories]


class RunListener:
    """Told what happens in a run, in the driver's thread, while the loop waits. Override what you need.

    An error ends the run: one of `agentrl.errors` with its message, any other as the fault of the listener.
    """

    def on_open(self, opened: Opened) -> None:
        """The folder and the console are open; nothing has started."""

    def on_start(self, run: Run) -> None:
        """All processes are ready; nothing was published."""

    def on_begin(self, run: Run) -> None:
        """A training begins: all listeners were started. Other weights may be published and validated."""

    def on_publish(self, run: Run) -> None:
        """The servers have the weights of `run.version`."""

    def on_attempts(self, run: Run, counts: AttemptCounts) -> None:
        """Attempts ended. counts: of training, since the start of the run. Called every second or so."""

    def metrics(self, step: FinishedStep) -> Mapping[str, float]:
        """Return numbers for the record of a step."""
        return {}

    def on_values(self, step: FinishedStep, values: Mapping[str, float]) -> Mapping[str, float]:
        """Judge the record of a step, which has the numbers of all listeners; return what to add to it."""
        return {}

    def on_step(self, step: FinishedStep) -> None:
        """A step is recorded."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint is complete."""

    def on_rollback(self, step: int) -> None:
        """The run went back to `step`; what came after it happens again."""

    def pinned(self) -> Collection[str]:
        """Return the names of checkpoints that must not be removed now. Called in another thread."""
        return ()

    def needed(self, step: int) -> Sequence[Path]:
        """Return the files of the run folder that a resume after `step` needs."""
        return ()

    def on_finish(self) -> None:
        """The run has come to its end: its policy and its closing table are written."""

    def on_end(self) -> None:
        """The run ends, for whatever reason; its processes still exist. Called if `on_start` succeeded."""

    def close(self, error: BaseException | None) -> None:
        """All processes are gone; the console is still there. error: what ended the run before its end."""


class Listeners:
    """The listeners of a run, by the names under which they are registered."""

    def __init__(self, members: Mapping[str, RunListener] | None = None) -> None:
        self._members = dict(members or {})
        self._opened: list[str] = []
        self._started: list[str] = []

    @classmethod
    def of(cls, config: Config, run_dir: RunDir, *, only: Collection[str] | None = None) -> Listeners:
        """Return the listeners that the config asks for. only: names; None: all that are registered.

        Raises:
            UserError: a setting of a listener is wrong.
        """
        listeners = cls()
        for name, one in registered(GROUP).items():
            if only is None or name in only:
                found = _guarded(name, partial(_made, one, config, run_dir))
                if found is not None:
                    listeners._members[name] = found
        return listeners

    def tell_open(self, opened: Opened) -> None:
        """Tell all that the folder and the console are open; `tell_close` must follow, after an error too."""
        for name, one in self._members.items():
            _guarded(name, partial(one.on_open, opened))
            self._opened.append(name)

    def tell_start(self, run: Run) -> None:
        """Tell all that the processes are ready; `tell_end` must follow, also after an error."""
        for name, one in self._members.items():
            _guarded(name, partial(one.on_start, run))
            self._started.append(name)

    def tell_end(self) -> None:
        """Tell those that were started that the run ends, the last first; all of them, also if one fails."""
        with ExitStack() as stack:
            for name in self._started:
                stack.callback(_guarded, name, self._members[name].on_end)

    def tell_close(self, error: BaseException | None = None) -> None:
        """Tell those that were opened that all processes are gone, as `tell_end` does."""
        with ExitStack() as stack:
            for name in self._opened:
                stack.callback(_guarded, name, partial(self._members[name].close, error))

    def tell(self, call: Callable[[RunListener], T]) -> list[T]:
        """Call every listener; return what they return."""
        return [_guarded(name, partial(call, one)) for name, one in self._members.items()]

    def metrics(self, step: FinishedStep) -> dict[str, float]:
        return _joined(self.tell(lambda one: one.metrics(step)))

    def on_values(self, step: FinishedStep, values: Mapping[str, float]) -> dict[str, float]:
        return _joined(self.tell(lambda one: one.on_values(step, values)))

    def pinned(self) -> set[str]:
        return {name for names in self.tell(RunListener.pinned) for name in names}

    def needed(self, step: int) -> list[Path]:
        return [file for files in self.tell(lambda one: one.needed(step)) for file in files]


def _made(one: Registered, config: Config, run_dir: RunDir) -> RunListener | None:
    found: RunListener | None = one.load()(config, run_dir)
    return found


def _guarded(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except AgentRLError:
        raise
    except Exception as error:  # third-party code
        raise PluginError(f"listener {name!r}: {failure_of(error)}") from error


def _joined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: value for part in parts for name, value in part.items()}
