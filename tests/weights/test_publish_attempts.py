"""Whom a publish reaches, asks again or gives up, by every transport: the rules alone, on servers that are a
few lines each.
"""

import threading
import time
from functools import partial

import pytest
import trio

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import InfrastructureError, RequestRefused, ServerError
from agentrl.servers.protocol import ModelInfo
from agentrl.servers.weight_changes import CHANGES_LOADER
from agentrl.types import SendTimes, TensorSpec
from agentrl.weights.publish import Publisher
from agentrl.weights.transport import LearnerCalls

SPECS = [TensorSpec(name, "float32", (4,), 16) for name in "abc"]
CHANGED_BYTES, TENSOR_BYTES = 6, 32
OPTIONS = [
    {"transport": "disk"},
    {"transport": "disk", "delta": True},
    {"transport": "distributed"},
    {"transport": "tensor"},
]


class Source:
    """A learner that notes what it was asked for; its broadcasts fail as often as it is told."""

    def __init__(self, *, lost_buckets=0):
        self.calls, self.lost_buckets, self.patience = [], lost_buckets, 1.0

    def tensor_specs(self):
        return SPECS

    def run(self, method, *args):
        return getattr(self, method.__name__)(*args)

    def find_address(self):
        return "127.0.0.1", 1

    def write_changes(self, folder):
        self.calls.append("write_changes")
        return CHANGED_BYTES

    def write_changed_tensors(self, folder):
        self.calls.append("write_changed_tensors")
        return TENSOR_BYTES

    def patient(self, times):
        self.patience = times
        return self

    def send_buckets(self, bucket_bytes):
        self.calls.append("send_buckets")
        if self.lost_buckets:
            self.lost_buckets -= 1
            raise InfrastructureError("a peer is gone")
        return SendTimes(1.0, 2.0)

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)


class Server:
    """A server that does what it is asked, but fails or hangs in one call, so often."""

    def __init__(self, number, *, call="", times=0, error=None, info=None):
        self.url = f"http://127.0.0.1:{number}"
        self.info = {"knows_changes": True} if info is None else info
        self.call, self.times, self.error = call, times, error
        self.version, self.is_paused, self.calls = None, False, []

    async def _do(self, name, /, *args, **options):
        self.calls.append(name)
        if name == self.call and self.times:
            self.times -= 1
            if self.error is None:
                await trio.sleep_forever()
            raise self.error
        self.is_paused = {"pause": True, "resume": False}.get(name, self.is_paused)
        if options.get("version") is not None:
            self.version = options["version"]
        answers = {
            "model_info": ModelInfo("", self.version),
            "server_info": self.info,
            "checksums": {"a": "0" * 64},
        }
        return answers.get(name)

    def __getattr__(self, name):
        return partial(self._do, name)


class Unhurried(Server):
    """A server whose update takes half a second."""

    async def _do(self, name, /, *args, **options):
        if name == self.call:
            await trio.sleep(0.5)
        return await super()._do(name, *args, **options)


def publisher(source, tmp_path, options):
    config = WeightsConfig(**{"timeout_s": 3.0, "bucket_bytes": 16, **options})
    return Publisher(source, config, folder=tmp_path, pause_mode="abort")


def publish(source, tmp_path, options, servers, *, versions=(1,)):
    async def main():
        one = publisher(source, tmp_path, options)
        with trio.fail_after(120):
            return [await one.publish(version, servers) for version in versions]

    return trio.run(main)


def update_of(options):
    return {
        "disk": "update_weights_from_disk",
        "distributed": "update_weights_from_distributed",
        "tensor": "update_weights_from_tensor",
    }[options["transport"]]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_failure_is_repaired_by_a_second_attempt(tmp_path, options):
    well, ill = (
        Server(1),
        Server(2, call=update_of(options), times=1, error=ServerError("answered 500", status=500)),
    )
    [report] = publish(Source(), tmp_path, options, [well, ill])
    assert dict(report.failed) == {}
    assert list(report.repaired) == [ill.url]
    assert "answered 500" in report.repaired[ill.url]
    assert [(s.version, s.is_paused) for s in (well, ill)] == [(1, False), (1, False)]
    assert well.calls.count("pause") == 1  # it has the weights, and samples on


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("error", [ServerError("answered 500", status=500), None], ids=["fails", "hangs"])
def test_what_fails_twice_is_named_and_stays_paused(tmp_path, options, error):
    well, ill = Server(1), Server(2, call=update_of(options), times=99, error=error)
    [report] = publish(Source(), tmp_path, options, [well, ill])
    assert list(report.failed) == [ill.url]
    assert ("answered 500" if error else "rollout.weights.timeout_s=3") in report.failed[ill.url]
    assert dict(report.repaired) == {}
    assert (well.version, well.is_paused) == (1, False)
    assert (ill.version, ill.is_paused) == (None, True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_who_does_not_answer_is_asked_for_nothing(tmp_path, options):
    well, gone = (
        Server(1),
        Server(2, call="model_info", times=99, error=ServerError("refused the connection")),
    )
    [report] = publish(Source(), tmp_path, options, [well, gone])
    assert dict(report.failed) == {gone.url: "refused the connection"}
    assert gone.calls == ["model_info"]
    assert well.version == 1
    [none] = publish(
        Source(), tmp_path, options, [Server(3, call="model_info", times=99, error=ServerError("refused"))]
    )
    assert len(none.failed) == 1


def test_a_lost_broadcast_makes_a_group_anew(tmp_path):
    source, servers = (
        Source(lost_buckets=1),
        [Server(1, call="end_weight_update", times=1, error=ServerError("the group is gone")), Server(2)],
    )
    [report] = publish(source, tmp_path, {"transport": "distributed"}, servers)
    assert dict(report.failed) == {}
    assert report.times == SendTimes(1.0, 2.0)
    assert source.calls.count("join_weights_groups") == 2
    assert [s.version for s in servers] == [1, 1]


def test_the_ranks_get_one_call_per_publish_however_many_buckets_and_servers(tmp_path):
    for bucket_bytes, num_buckets in ((16, 3), (48, 1)):
        source, servers = Source(), [Server(1), Server(2)]
        publish(
            source,
            tmp_path,
            {"transport": "distributed", "bucket_bytes": bucket_bytes},
            servers,
            versions=(1, 2),
        )
        assert [server.calls.count("update_weights_from_distributed") for server in servers] == (
            2 * [2 * num_buckets]
        )
        assert source.calls[-2:] == ["send_buckets", "send_buckets"]
        assert source.calls.count("send_buckets") == 2
        # two collectives for a call, and one for each bucket
        assert source.patience == 1 + num_buckets / 2


class Listing(Server):
    """A server that also notes the process group of each call."""

    def __init__(self, number):
        super().__init__(number)
        self.groups = []

    async def _do(self, name, /, *args, **options):
        given = options.get("name", options.get("group"))
        if given is not None:
            self.groups.append((name, given))
        return await super()._do(name, *args, **options)


def test_a_server_that_stages_is_paused_only_for_the_swap(tmp_path):
    staging, other = Server(1, info={"stages_updates": True}), Server(2)
    publish(Source(), tmp_path, {"transport": "distributed"}, [staging, other], versions=(1, 2))
    received = 3 * ["update_weights_from_distributed"]
    swap = ["pause", "end_weight_update", "resume"]
    assert staging.calls[-7:] == ["begin_weight_update", *received, *swap]
    assert other.calls[-7:] == ["end_weight_update", "begin_weight_update", *received, *swap[1:]]
    assert other.calls[-8] == "pause"
    assert [(server.version, server.is_paused) for server in (staging, other)] == [(2, False)] * 2


def test_a_staging_server_that_fails_before_the_swap_is_tried_again(tmp_path):
    failing = Server(
        1,
        call="update_weights_from_distributed",
        times=1,
        error=ServerError("answered 500", status=500),
        info={"stages_updates": True},
    )
    [report] = publish(Source(), tmp_path, {"transport": "distributed"}, [failing])
    assert (dict(report.failed), list(report.repaired)) == ({}, [failing.url])
    assert failing.calls.count("begin_weight_update") == 2
    assert failing.calls.count("pause") == 1
    assert (failing.version, failing.is_paused) == (1, False)


def test_sources_take_turns_and_each_has_a_group(tmp_path):
    servers = [Listing(1), Listing(2)]
    publish(Source(), tmp_path, {"transport": "distributed", "sources": 2}, servers)
    for server in servers:
        [(_, one), (_, two), *received] = server.groups
        assert [name for name, _ in server.groups[:2]] == ["init_weights_group"] * 2
        assert one != two
        assert received == [("update_weights_from_distributed", name) for name in (one, two, one)]


@pytest.mark.parametrize("options", [{"transport": "disk"}, {"transport": "distributed"}], ids=str)
def test_a_large_model_has_more_time_than_a_small_one(tmp_path, options):
    """A gigabyte has 20 seconds more than the 0.2 that nobody keeps here."""

    def report(num_bytes):
        source = Source()
        source.tensor_specs = lambda: [TensorSpec("a", "float32", (4,), num_bytes)]
        [found] = publish(
            source, tmp_path, options | {"timeout_s": 0.2}, [Unhurried(1, call=update_of(options))]
        )
        return found

    assert dict(report(10**9).failed) == {}
    [why] = report(16).failed.values()
    assert "did not answer within 0.2 s (rollout.weights.timeout_s=0.2)" in why


def test_a_delta_goes_to_whom_has_its_base_and_all_weights_to_others(tmp_path):
    source, servers = Source(), [Server(1), Server(2)]
    _, second = publish(source, tmp_path, {"transport": "disk", "delta": True}, servers, versions=(1, 2))
    assert source.calls == ["write_base", "write_changes"]
    assert second.num_bytes == 2 * CHANGED_BYTES
    refusing = Server(3, call="update_weights_from_disk", times=0)
    source = Source()

    async def main():
        one = publisher(source, tmp_path, {"transport": "disk", "delta": True})
        await one.publish(1, [refusing])
        refusing.times, refusing.error = 1, RequestRefused("other weights", status=400)
        return await one.publish(2, [refusing])

    report = trio.run(main)
    assert dict(report.failed) == dict(report.repaired) == {}
    assert source.calls == ["write_base", "write_changes", "write_base"]
    assert refusing.version == 2


def test_each_kind_of_server_reads_changes_as_it_can(tmp_path):
    """The tensors whole are written only for a server that reads nothing else."""
    options = {"transport": "disk", "delta": True}
    sglang = {"custom_weight_loader": ["mine.load", CHANGES_LOADER], "tp_size": 2}
    kinds = {
        "embedded": ({"knows_changes": True}, CHANGED_BYTES),
        "sglang": (sglang, CHANGED_BYTES),
        "without the loader": ({"custom_weight_loader": None}, TENSOR_BYTES),
        "copies": ({**sglang, "dp_size": 2}, TENSOR_BYTES),
    }
    for kind, (info, num_bytes) in kinds.items():
        source, server = Source(), Server(1, info=info)
        _, second = publish(source, tmp_path, options, [server], versions=(1, 2))
        assert (second.num_bytes, server.version) == (num_bytes, 2)
        assert source.calls[2:] == ["write_changed_tensors"] * (num_bytes == TENSOR_BYTES)
        by_loader = [
            "end_weight_update",
            "begin_weight_update",
            "update_weights_from_tensor",
            "end_weight_update",
        ]
        last = server.calls[server.calls.index("resume") + 1 :]
        assert last[last.index("pause") + 1 : -1] == (
            by_loader if kind == "sglang" else ["update_weights_from_disk"]
        )


def test_after_changes_that_could_not_be_written_all_weights_are(tmp_path):
    source, server = Source(), Server(1)

    def fail(folder):
        raise InfrastructureError("the disk is full")

    async def main():
        one = publisher(source, tmp_path, {"transport": "disk", "delta": True})
        await one.publish(1, [server])
        source.write_changes = fail
        with pytest.raises(InfrastructureError, match="disk is full"):
            await one.publish(2, [server])
        del source.write_changes
        await one.publish(2, [server])
        await one.publish(3, [server])

    trio.run(main)
    assert source.calls == ["write_base", "write_base", "write_changes"]
    assert server.version == 3


def test_pickles_stay_on_this_machine(tmp_path):
    far = Server(1)
    far.url = "http://10.0.0.1:30000"
    [report] = publish(Source(), tmp_path, {"transport": "tensor"}, [far])
    assert "is on another machine" in report.failed[far.url]
    assert "update_weights_from_tensor" not in far.calls


# ---------------------------------------------------------------------- the learner is slower than a deadline


class SlowSource(Source):
    """A learner whose calls of one name take long, and which counts the calls that run beside each other."""

    def __init__(self, slow, seconds):
        super().__init__()
        self.slow, self.seconds = slow, seconds
        self.counting, self.num_running, self.most_at_once = threading.Lock(), 0, 0

    def run(self, method, *args):
        with self.counting:
            self.num_running += 1
            self.most_at_once = max(self.most_at_once, self.num_running)
        try:
            if method.__name__ == self.slow:
                time.sleep(self.seconds)
            return super().run(method, *args)
        finally:
            with self.counting:
                self.num_running -= 1


def test_a_call_that_a_deadline_abandons_ends_before_the_next_one_begins():
    ended, begun = threading.Event(), []

    def slow():
        time.sleep(0.5)
        ended.set()

    async def abandon(calls):
        with trio.move_on_after(0.1):
            await calls.call(slow)
        assert not ended.is_set()
        with trio.move_on_after(0.1):  # still waiting for its turn when it is abandoned, too
            await calls.call(partial(begun.append, "abandoned"))

    async def go_on(calls):
        return await calls.call(ended.is_set)

    calls = LearnerCalls(Source())
    trio.run(abandon, calls)
    assert trio.run(go_on, calls), "the next publish called the ranks beside a call of the last one"
    assert begun == []


@pytest.mark.parametrize(
    ("options", "slow"),
    [({"transport": "tensor"}, "pickle_bucket"), ({"transport": "disk", "verify": True}, "checksums")],
    ids=["tensor", "checksums"],
)
def test_a_learner_slower_than_a_deadline_never_runs_two_calls_at_once(tmp_path, options, slow):
    source = SlowSource(slow, 0.7)
    [report] = publish(source, tmp_path, {**options, "timeout_s": 0.5}, [Server(1), Server(2)])
    assert sorted(report.failed) == [Server(1).url, Server(2).url]
    assert source.most_at_once == 1


def test_a_server_does_not_fail_because_the_learner_writes_all_weights_slowly(tmp_path):
    source, late = SlowSource("write_base", 0.8), Server(2)

    async def main():
        one = publisher(source, tmp_path, {"transport": "disk", "delta": True, "timeout_s": 0.5})
        await one.publish(1, [Server(1)])
        return await one.publish(
            2, [Server(1), late]
        )  # it joins, and nobody has written version 2 as a whole

    report = trio.run(main)
    assert dict(report.failed) == dict(report.repaired) == {}
    assert source.calls == ["write_base", "write_changes", "write_base"]
    assert late.calls.count("update_weights_from_disk") == 1
