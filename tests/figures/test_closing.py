"""The closing table tells what installed packages know of a run, and survives those that fail."""

from importlib.metadata import EntryPoint

from agentrl import registered
from agentrl.figures import closing
from agentrl.tracking.metrics import StepRecord
from agentrl.types import BufferCounts

RECORDS = [StepRecord("train", 1, 1, 0.0, {"worlds/built": 3.0})]


def worlds(records):
    return [f"worlds: {sum(record.values['worlds/built'] for record in records):.0f} built"]


def broken(records):
    raise ZeroDivisionError("no worlds")


def notes_with(monkeypatch, **functions):
    group = "agentrl.closing_notes"
    found = {
        name: registered.Registered(EntryPoint(name, f"{__name__}:{function.__name__}", group))
        for name, function in functions.items()
    }
    for one, function in zip(found.values(), functions.values(), strict=True):
        object.__setattr__(one, "load", lambda function=function: function)
    monkeypatch.setattr(closing, "registered", lambda asked: found if asked == group else {})
    counts = BufferCounts(1, 0, 0, 0, 1, dropped={}, discarded={})
    table = closing.closing_of({}, step=1, version=1, counts=counts, records=RECORDS, failures=["two"])
    return table.notes


def test_a_package_adds_lines_before_the_failures(monkeypatch):
    *_, own, title, failure = notes_with(monkeypatch, worlds=worlds)
    assert (own, title, failure) == ("worlds: 3 built", "failures, validation included:", "  two")


def test_one_that_fails_is_named_and_takes_nothing_from_the_table(monkeypatch):
    notes = notes_with(monkeypatch, broken=broken, worlds=worlds)
    assert "notes of broken (an unknown package) failed: ZeroDivisionError: no worlds" in notes
    assert "worlds: 3 built" in notes
