"""The verbs of a run that need no cluster: what they do to its parts, which are stand-ins here."""

from types import SimpleNamespace

from agentrl.buffer.lineage import Lineage
from agentrl.config.schema import Config
from agentrl.controller.listeners import Listeners
from agentrl.controller.run import Run
from agentrl.tracking.closing_table import STEP


def run_of(calls, *, step=0):
    """Return a Run whose parts write down what is asked of them."""

    def noted(name, answer=None):
        def call(*_, **__):
            calls.append(name)
            return answer

        return call

    run = object.__new__(Run)
    run.config, run.step, run.results = Config(), step, {}
    run.observer = SimpleNamespace(say=noted("say"), go_back=noted("go_back"), unwritten=None)
    run.rollouts = SimpleNamespace(heal=noted("heal actors"))
    verbs = {"advance": noted("advance", Lineage()), "roll_back": noted("roll back")}
    run.buffer = SimpleNamespace(run=lambda method, *_: verbs[method.__name__]())
    run.servers = SimpleNamespace(urls=["a"], urls_needing_weights=[])
    run.ranks = SimpleNamespace(roles=SimpleNamespace(learner=None))
    run.has_learned = False
    run.listeners = Listeners()
    run._elastic = SimpleNamespace(attend=noted("attend to servers"))
    run._publishing = SimpleNamespace(version=4, publish=noted("publish"), set_learner=noted("set learner"))
    return run


def test_a_run_that_never_waits_for_its_batches_heals_at_every_step():
    calls = []
    run = run_of(calls)
    run.publish()
    assert calls == ["heal actors", "attend to servers", "publish", "advance"]


def test_going_back_forgets_the_validation_of_a_step_that_is_made_again():
    run = run_of([], step=8)
    run.results = {"warm": {"val/accuracy": 0.1}, "initial": {STEP: 0}, "final": {STEP: 6}}
    run.go_back(5)
    assert (run.step, list(run.results)) == (5, ["warm", "initial"])
    run.results["final"] = {STEP: 5}
    run.go_back(5)
    assert list(run.results) == ["warm", "initial", "final"]
