"""New weights: by disk and by process group, their versions on every token, and what an update refuses."""

import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from agentrl.errors import RequestRefused
from agentrl.servers.process_group import tensor_checksum
from agentrl.types import SamplingParams, TensorSpec
from parts.learner import reserved_port

PROMPT = [5, 17, 42]
GREEDY = SamplingParams(10, temperature=0.0)

ONLY_SGLANG = pytest.mark.parametrize(
    "running_server", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True
)
"""The embedded server knows one way to pause."""
ONLY_EMBEDDED = pytest.mark.parametrize("running_server", ["embedded"], indirect=True)
"""A real SGLang ignores unknown names, and dies of wrong shapes and of half a file."""

TRAINER = """
import sys
from safetensors.torch import load_file
from agentrl.servers.process_group import broadcast, flatten, join_weights_group, leave_weights_group
port, folder, load_format = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = join_weights_group(address="127.0.0.1", port=port, rank=0, world_size=2, name="g", backend="gloo", timeout_s=60)
tensors = list(load_file(folder + "/model.safetensors").values())
for tensor in [flatten(tensors)] if load_format == "flattened_bucket" else tensors:
    broadcast(tensor, group)
print("sent", flush=True)
leave_weights_group(group)
"""  # noqa: E501


def specs_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size())
        for name, t in tensors.items()
    ]


async def until_running(client, *, count=1):
    """Return while so many requests run, at least one of them in the middle of its output."""
    while (load := await client.loads()).num_running < count or load.num_used_tokens <= len(PROMPT) + 5:
        await trio.sleep(0.005)


@asynccontextmanager
async def generating(client, sample_on, *, count):
    """Have `count` requests in the middle of 300 tokens; yield the list that holds their generations when the
    context is left.
    """
    done = []

    async def one(index):
        done.append(await sample_on(PROMPT, 300, rid=f"runs-{index}"))

    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(one, index)
        await until_running(client, count=count)  # one that arrives later would be queued behind what follows
        yield done


def test_disk_update_changes_the_next_tokens_and_their_version(server, talk, logprobs_of):
    async def script(client):
        before = await client.generate(PROMPT, GREEDY, rid="before")
        await client.pause("abort")
        await client.update_weights_from_disk(str(server.other), version=7, flush_cache=True)
        await client.resume()
        return before, await client.generate(PROMPT, GREEDY, rid="after"), await client.model_info()

    before, after, info = talk(script)
    assert before.token_ids.tolist() != after.token_ids.tolist()
    np.testing.assert_allclose(
        after.logprobs, logprobs_of(server.other, PROMPT, after.token_ids.tolist()), atol=1e-4
    )
    assert set(before.versions) == {0}
    assert set(after.versions) == {7}
    assert info.version == 7


def test_generations_across_an_update_are_continued_with_exact_versions(server, talk, sample_on, logprobs_of):
    """What the client of a run does: take the partial output, send it again as part of the prompt under the
    same rid.
    """
    total = 300

    async def script(client):
        played = {}

        async def play(rid):
            ids, parts = list(PROMPT), []
            while not parts or parts[-1].finish_reason == "abort":
                parts.append(await sample_on(ids, len(PROMPT) + total - len(ids), rid=rid))
                ids += parts[-1].token_ids.tolist()
            played[rid] = parts

        async with trio.open_nursery() as nursery:
            for i in range(4):  # more than the cache holds at once: some run, some wait
                nursery.start_soon(play, f"rid-{i}")
            await until_running(client)
            await client.pause("abort")
            await client.update_weights_from_disk(str(server.other), version=1, flush_cache=True)
            await client.resume()
        return played

    played = talk(script)
    assert len(played) == 4
    for parts in played.values():
        prefix, models = list(PROMPT), (server.model, server.other)
        for part in parts:
            assert len(set(part.versions.tolist())) <= 1
            ids = part.token_ids.tolist()
            if ids:
                np.testing.assert_allclose(
                    part.logprobs, logprobs_of(models[part.versions[0]], prefix, ids), atol=1e-4
                )
            prefix += ids
        assert len(prefix) == len(PROMPT) + total
    assert {part.versions[0] for parts in played.values() for part in parts if len(part.versions)} == {0, 1}


@ONLY_SGLANG
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_other_pause_modes_end_no_request(server, talk, sample_on, logprobs_of, mode):
    """`retract` computes the prefix anew and is exact; `in_place` goes on with the cache of the old weights
    and is off by design.
    """

    async def script(client):
        async with generating(client, sample_on, count=2) as done:
            await client.pause(mode)
            await client.update_weights_from_disk(str(server.other), version=1, flush_cache=mode == "retract")
            await client.resume()
        return done

    for got in talk(script):
        assert got.finish_reason == "length"
        assert got.versions.tolist() == sorted(got.versions)
        assert set(got.versions) == {0, 1}
        ids = got.token_ids.tolist()
        of_versions = np.array([logprobs_of(model, PROMPT, ids) for model in (server.model, server.other)])
        error = np.abs(got.logprobs - of_versions[got.versions, np.arange(len(ids))])
        assert error[got.versions == 0].max() < 1e-4
        if mode == "retract":
            assert error.max() < 1e-4
        else:
            assert error.max() > 1e-2


def test_an_update_without_a_pause_waits_for_what_runs(server, talk, sample_on):
    async def script(client):
        async with generating(client, sample_on, count=4) as done:
            await client.update_weights_from_disk(str(server.other), version=3, flush_cache=True)
        return done, await client.model_info()

    done, info = talk(script)
    assert all(g.finish_reason == "length" and set(g.versions) == {0} for g in done)
    assert info.version == 3


@pytest.mark.parametrize("load_format", ["flattened_bucket", None])
def test_distributed_update_from_a_trainer_process(server, talk, spawn, logprobs_of, load_format):
    port = reserved_port()
    specs = specs_of(server.other)

    async def script(client):
        trainer = spawn([sys.executable, "-c", TRAINER, str(port), str(server.other), str(load_format)])
        await client.init_weights_group(
            address="127.0.0.1", port=port, rank_offset=1, world_size=2, name="g", backend="gloo"
        )
        await client.pause("abort")
        await client.begin_weight_update()
        if load_format:
            await client.update_weights_from_distributed(specs, group="g", version=9, flush_cache=True)
        else:
            body = {
                "names": [s.name for s in specs],
                "dtypes": [s.dtype for s in specs],
                "shapes": [s.shape for s in specs],
            }
            await client._update(
                "/update_weights_from_distributed", body | {"group_name": "g", "weight_version": "9"}
            )
        await client.end_weight_update()
        await client.resume()
        await client.destroy_weights_group("g")
        with pytest.raises(RequestRefused, match="does not exist"):
            await client.destroy_weights_group("g")
        await trio.to_thread.run_sync(trainer.wait)
        return await client.generate(PROMPT, GREEDY, rid="after")

    after = talk(script)
    np.testing.assert_allclose(
        after.logprobs, logprobs_of(server.other, PROMPT, after.token_ids.tolist()), atol=1e-4
    )
    assert set(after.versions) == {9}


def test_distributed_update_needs_a_session_and_a_group(server, talk):
    specs = specs_of(server.other)

    async def script(client):
        with pytest.raises(RequestRefused, match="begin_weight_update"):
            await client.update_weights_from_distributed(specs, group="zz", version=1, flush_cache=True)
        await client.begin_weight_update()
        with pytest.raises(RequestRefused, match="zz"):
            await client.update_weights_from_distributed(specs, group="zz", version=1, flush_cache=True)
        await client.end_weight_update()
        return await client.model_info()

    assert talk(script).version == 0


def test_checksums_tell_weights_apart(server, talk):
    async def script(client):
        first = await client.checksums()
        await client.update_weights_from_disk(str(server.other), version=1, flush_cache=True)
        second = await client.checksums()
        await client.update_weights_from_disk(str(server.model), version=2, flush_cache=True)
        return first, second, await client.checksums()

    first, second, again = talk(script)
    assert first == again
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first if "norm" not in name and "bias" not in name)
    if server.capabilities.checksums_by_hf_name:
        tensors = load_file(server.other / "model.safetensors")
        assert {name: tensor_checksum(t) for name, t in tensors.items()}.items() <= second.items()


def test_renaming_the_version_during_a_generation_is_seen_per_token(talk, sample_on):
    async def script(client):
        done = []

        async def one(rid):
            done.append((await sample_on(PROMPT, 300, rid=rid)).versions.tolist())

        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(one, f"renamed-{i}")
            await until_running(client)
            await client.update_weight_version(5)
        return done

    done = talk(script)
    assert all(versions == sorted(versions) and set(versions) <= {0, 5} for versions in done)
    assert any(set(versions) == {0, 5} for versions in done)


def test_a_missing_folder_is_refused(talk):
    async def script(client):
        with pytest.raises(RequestRefused) as caught:
            await client.update_weights_from_disk("/nowhere", version=1, flush_cache=True)
        assert caught.value.status == 400
        return await client.model_info()

    assert talk(script).version == 0


@ONLY_EMBEDDED
def test_staged_weights_arrive_while_it_samples_and_replace_the_old_ones_at_the_end(
    server, talk, spawn, sample_on, logprobs_of
):
    port, specs = reserved_port(), specs_of(server.other)

    async def script(client):
        assert (await client.server_info())["stages_updates"] is True
        trainer = spawn([sys.executable, "-c", TRAINER, str(port), str(server.other), "flattened_bucket"])
        await client.init_weights_group(
            address="127.0.0.1", port=port, rank_offset=1, world_size=2, name="g", backend="gloo"
        )
        before = await client.checksums()
        await client.begin_weight_update(is_staged=True)
        # Nothing is pending: without staging, a request would wait for the end of the session.
        with trio.fail_after(60):
            waiting = await client.generate(PROMPT, GREEDY, rid="waiting")
        async with generating(client, sample_on, count=2) as done:
            await client.update_weights_from_distributed(specs, group="g", version=9, flush_cache=True)
            with trio.fail_after(60):
                staged = await client.generate(PROMPT, GREEDY, rid="staged")
            assert await client.checksums() == before
            await client.pause("abort")
            await client.end_weight_update()
            await client.resume()
        after = await client.generate(PROMPT, GREEDY, rid="after")
        await client.destroy_weights_group("g")
        await trio.to_thread.run_sync(trainer.wait)
        return waiting, staged, done, after

    waiting, staged, done, after = talk(script)
    for old in (waiting, staged, *done):
        assert set(old.versions) <= {0, 9}
    assert set(waiting.versions) == set(staged.versions) == {0}
    assert set(after.versions) == {9}
    for got, folder in ((waiting, server.model), (staged, server.model), (after, server.other)):
        own = logprobs_of(folder, PROMPT, got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, own, atol=1e-4)


@ONLY_EMBEDDED
def test_a_staged_session_without_its_last_bucket_changes_nothing(server, talk, spawn):
    port, specs = reserved_port(), specs_of(server.other)

    async def script(client):
        trainer = spawn([sys.executable, "-c", TRAINER, str(port), str(server.other), "flattened_bucket"])
        await client.init_weights_group(
            address="127.0.0.1", port=port, rank_offset=1, world_size=2, name="g", backend="gloo"
        )
        before = await client.checksums()
        await client.begin_weight_update(is_staged=True)
        await client.update_weights_from_distributed(specs, group="g", version=None, flush_cache=True)
        with pytest.raises(RequestRefused, match="before the update with the version came; the old weights"):
            await client.end_weight_update()
        assert await client.checksums() == before
        await client.end_weight_update()  # nothing of it is left
        assert await client.checksums() == before
        await client.begin_weight_update()
        with pytest.raises(RequestRefused, match="not staged is open; end it first"):
            await client.begin_weight_update(is_staged=True)
        await client.end_weight_update()
        await client.begin_weight_update(is_staged=True)
        await client.end_weight_update()
        await client.destroy_weights_group("g")
        await trio.to_thread.run_sync(trainer.wait)
        return await client.generate(PROMPT, GREEDY, rid="after")

    assert set(talk(script).versions) == {0}


def spoil_name(tensors):
    tensors["model.unknown.weight"] = torch.zeros(3)


def spoil_shape(tensors):
    tensors["model.norm.weight"] = torch.zeros(3)


def spoil_missing(tensors):
    del tensors["model.norm.weight"]


def spoil_value(tensors):
    tensors["model.norm.weight"] = torch.full((32,), float("nan"))


@ONLY_EMBEDDED
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_name, "model.unknown.weight"),
        (spoil_shape, "shape"),
        (spoil_missing, "missing"),
        (spoil_value, "finite"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(server, talk, scratch, spoil, message):
    tensors = {name: t + 1 for name, t in load_file(scratch / "model.safetensors").items()}
    spoil(tensors)
    save_file(tensors, scratch / "model.safetensors")

    async def script(client):
        before = await client.checksums()
        with pytest.raises(RequestRefused, match=message) as caught:
            await client.update_weights_from_disk(str(scratch), version=4, flush_cache=True)
        assert caught.value.status == 400
        assert await client.checksums() == before
        return await client.model_info()

    assert talk(script).version == 0


@ONLY_EMBEDDED
def test_half_a_file_is_refused(server, talk, scratch):
    file = scratch / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])

    async def script(client):
        with pytest.raises(RequestRefused):
            await client.update_weights_from_disk(str(scratch), version=4, flush_cache=True)
        return await client.model_info()

    assert talk(script).version == 0
