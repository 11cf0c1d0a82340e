"""Listeners of a run: who is told, in which order, and what an error of one does to the others."""

import pytest

from agentrl.controller.listeners import Listeners, RunListener
from agentrl.errors import InfrastructureError, PluginError


class Noted(RunListener):
    """Writes down what it is told; fails in one method."""

    def __init__(self, name, told, *, fails_in="", error=None):
        self.name, self.told, self.fails_in = name, told, fails_in
        self.error = error or ZeroDivisionError("by nothing")

    def note(self, what):
        self.told.append(f"{self.name} {what}")
        if what == self.fails_in:
            raise self.error

    def on_open(self, opened):
        self.note("open")

    def on_start(self, run):
        self.note("start")

    def on_end(self):
        self.note("end")

    def close(self, error):
        self.note("close")


def three(told, **fault):
    return Listeners({"a": Noted("a", told), "b": Noted("b", told, **fault), "c": Noted("c", told)})


def test_an_error_is_one_line_with_the_name_and_the_place():
    with pytest.raises(PluginError) as caught:
        three([], fails_in="open").tell_open(None)
    assert str(caught.value).startswith("listener 'b': ZeroDivisionError: by nothing (test_listeners.py:")


def test_an_error_of_our_own_keeps_its_kind():
    with pytest.raises(InfrastructureError, match=r"^no more$"):
        three([], fails_in="start", error=InfrastructureError("no more")).tell_start(None)


def test_only_those_that_were_opened_are_closed_and_the_last_first():
    told = []
    listeners = three(told, fails_in="open")
    with pytest.raises(PluginError):
        listeners.tell_open(None)
    listeners.tell_close(None)
    assert told == ["a open", "b open", "a close"]


@pytest.mark.parametrize(("begin", "end"), [("open", "close"), ("start", "end")])
def test_one_that_fails_at_the_end_keeps_it_from_no_other(begin, end):
    told = []
    listeners = three(told, fails_in=end)
    getattr(listeners, f"tell_{begin}")(None)
    told.clear()
    with pytest.raises(PluginError, match="listener 'b'"):
        getattr(listeners, f"tell_{end}")()
    assert told == [f"c {end}", f"b {end}", f"a {end}"]
