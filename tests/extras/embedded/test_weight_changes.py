"""Transport `disk` with deltas: a server that has the weights before reads what changed, any other one is
given all of them.
"""

from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, WeightsConfig
from agentrl.errors import RequestRefused
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.learner.learner import LearnerSpec
from agentrl.servers.supervisor import Supervisor
from agentrl.servers.weight_changes import CHANGES_FILE, CHANGES_FORMAT
from agentrl.weights.publish import Publisher
from parts.clients import talk
from parts.learner import lone_learner, update_once, write_tiny_model

VOCABULARY = 61


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A learner in bfloat16 with a learning rate as of real runs, and the folder it began with."""
    folder = tmp_path_factory.mktemp("learner")
    write_tiny_model(folder, VOCABULARY, max_position_embeddings=512, eos_token_id=VOCABULARY - 1)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-6))
    spec = LearnerSpec(
        ModelConfig(path=str(folder), dtype="bfloat16"), config, AlgorithmConfig(), "decoupled", 3, 1.0, 20
    )
    with lone_learner(spec) as one:
        yield SimpleNamespace(one=one, path=str(folder), workers=LocalWorker(one))


@pytest.fixture(scope="module")
def url(learner, tmp_path_factory):
    launcher = EmbeddedServer(EmbeddedServerConfig(num_blocks=32), "bfloat16")
    supervisor = Supervisor(
        launcher, log_file=tmp_path_factory.mktemp("log") / "log", start_timeout_s=240, max_restarts=0
    )
    yield supervisor.start(learner.path, "default")
    supervisor.stop()


def publisher(learner, folder, **options):
    config = WeightsConfig(verify=True, **options)
    return Publisher(learner.workers, config, folder=folder, pause_mode="abort")


def test_only_what_changed_is_sent_to_whom_has_the_rest(learner, url, tmp_path):
    async def script(client):
        publish = publisher(learner, tmp_path, delta=True).publish
        reports = [await publish(1, [client])]
        for version in (2, 3):
            update_once(learner.one, VOCABULARY)
            reports.append(await publish(version, [client]))
        await client.update_weights_from_disk(
            learner.path, version=3, flush_cache=True
        )  # it has other weights than we think
        update_once(learner.one, VOCABULARY)
        reports.append(await publish(4, [client]))
        update_once(learner.one, VOCABULARY)
        reports.append(await publish(5, [client]))
        return reports, (await client.model_info()).version

    reports, version = talk(script, url)
    # `verify` compared every weight, bit for bit.
    assert [dict(report.failed) for report in reports] == [{}] * 5
    assert version == 5
    whole, *changes, again, last = (report.num_bytes for report in reports)
    assert again == pytest.approx(whole, rel=0.01)
    assert all(0 < size < whole / 4 for size in [*changes, last])


def test_changes_that_do_not_fit_or_were_damaged_change_nothing(learner, url, tmp_path):
    base, changes = tmp_path / "base", tmp_path / "changes"
    learner.one.write_base(str(base), False)
    update_once(learner.one, VOCABULARY)
    assert learner.one.write_changes(str(changes)) > 0
    parts = load_file(changes / CHANGES_FILE)

    async def refuse(client, message):
        before = await client.checksums()
        with pytest.raises(RequestRefused, match=message):
            await client.update_weights_from_disk(
                str(changes), version=9, flush_cache=True, load_format=CHANGES_FORMAT
            )
        assert await client.checksums() == before
        assert (await client.model_info()).version == 0

    async def script(client):
        await client.update_weights_from_disk(learner.path, version=0, flush_cache=True)
        await refuse(client, "this server has None")
        await client.update_weights_from_disk(str(base), version=0, flush_cache=True)
        key = next(key for key in parts if key.endswith("|values"))
        save_file(parts | {key: parts[key] + 1}, changes / CHANGES_FILE)
        await refuse(client, "checksum")
        (changes / CHANGES_FILE).write_bytes((changes / CHANGES_FILE).read_bytes()[:100])
        await refuse(client, "cannot be read")

    talk(script, url)


def test_a_group_and_a_folder_after_changes_leave_the_same_weights(learner, url, tmp_path):
    """An update by another transport ends the chain: changes that follow are refused, and all weights are
    sent.
    """

    async def script(client):
        by_changes = publisher(learner, tmp_path / "changes", delta=True)
        by_group = publisher(learner, tmp_path / "group", transport="distributed", bucket_bytes=4096)
        reports = [await by_changes.publish(1, [client])]
        update_once(learner.one, VOCABULARY)
        reports.append(await by_group.publish(2, [client]))
        await client.update_weight_version(1)
        reports.append(await by_changes.publish(3, [client]))
        await by_group.transport.close([client])
        return reports

    reports = talk(script, url)
    assert [dict(report.failed) for report in reports] == [{}] * 3
    assert reports[2].num_bytes == pytest.approx(reports[0].num_bytes, rel=0.01)
    assert reports[1].times.gather_s > 0
