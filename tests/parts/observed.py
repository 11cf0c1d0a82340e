"""An observer with the listeners that need no process of a run."""

from agentrl.controller.listeners import Listeners, Opened
from agentrl.controller.observe import Observer


def observed(config, run_dir, *, said=None):
    """Return an observer whose alarms listen. said: gets what is said, in place of the console."""
    listeners = Listeners.of(config, run_dir, only=("alarms",))
    observer = Observer(config, run_dir, resumed_at=None, listeners=listeners)
    if said is not None:
        observer.say = said.append
    listeners.tell_open(Opened(observer, None, listeners.needed))
    return observer
