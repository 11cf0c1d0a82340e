"""What ranks send in buckets and write into files together is the whole weight, rounded once: byte for byte,
however the weights are sharded.

The file is also the program that forks four ranks: they play every scene, and the tests look at what they
found.
"""

import dataclasses
import json
import resource
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.config.learner import FSDPConfig, LearnerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.errors import DiskError
from agentrl.learner import buckets
from agentrl.learner import weights as outgoing
from agentrl.learner.buckets import BucketGatherer, plan_buckets
from agentrl.learner.division import Box, divide
from agentrl.learner.learner import Learner
from agentrl.learner.sharding import own_part, put
from agentrl.servers.process_group import flatten
from parts.experts import write_experts
from parts.learner import learner_spec, reserved_ports, tiny_sizes
from parts.ranks import run_program, run_ranks

VOCABULARY = 61
WORLD_SIZE = 4
LAST = WORLD_SIZE - 1
TIMEOUT_S = 200.0
SIZES = tiny_sizes(VOCABULARY)
BUCKET_BYTES = (1, 3000, 10**9)
"""One weight in each bucket, several in most, all in one."""
FILE_BYTES = 20_000
SCENES = {
    "rounded": {"model": {"dtype": "bfloat16"}},
    "unequal parts": {"sizes": {"intermediate_size": 47}},
    "copies": {"model": {"dtype": "bfloat16"}, "learner": {"fsdp": FSDPConfig(shard_size=2)}},
    "columns": {"model": {"dtype": "bfloat16"}, "redistribute": True},
    "adapters": {
        "model": {"dtype": "bfloat16", "lora": LoRAConfig(rank=2, target_modules=("q_proj", "down_proj"))}
    },
    "cut layers": {"path": "qwen3", "learner": {"tensor_parallel": 2}},
    # Half of the MLP has 23 rows, of which the ranks that shard it further have 12 and 11.
    "cut layers, unequal parts": {"path": "odd qwen3", "learner": {"tensor_parallel": 2}},
    "cut layers with adapters, copies": {
        "path": "qwen3",
        "model": {"dtype": "bfloat16", "lora": LoRAConfig(rank=2, target_modules=("q_proj", "down_proj"))},
        "learner": {"tensor_parallel": 2, "fsdp": FSDPConfig(shard_size=2)},
    },
    "cut layers, divided experts": {
        "path": "4 experts",
        "model": {"dtype": "bfloat16"},
        "learner": {"tensor_parallel": 2, "expert_parallel": 2},
    },
    "experts": {"path": "experts", "model": {"dtype": "bfloat16"}},
    "experts by rows": {"path": "4 experts", "model": {"dtype": "bfloat16"}},
    # The two owners of two experts have one each, those of three a half of each.
    **{
        f"{number} divided experts": {
            "path": f"{number} experts",
            "model": {"dtype": "bfloat16"},
            "learner": {"expert_parallel": 2},
        }
        for number in (4, 6)
    },
    "copies of divided experts": {
        "path": "4 experts",
        "model": {"dtype": "bfloat16"},
        "learner": {"expert_parallel": 2, "fsdp": FSDPConfig(shard_size=2)},
    },
}
APART = (
    ["cut layers", "cut layers, unequal parts"],
    ["cut layers with adapters, copies"],
    ["cut layers, divided experts"],
)
"""Scenes in processes of their own: torch's caches of sharded tensors do not tell apart two meshes of one
shape with other process groups, and would use a group of a world that is closed.
"""


def learner(scene, rank, port, folder):
    options = SCENES[scene]
    path = {"path": str(folder / options["path"])} if "path" in options else {}
    config = LearnerConfig(
        world_size=WORLD_SIZE, collective_timeout_s=TIMEOUT_S, **options.get("learner", {})
    )
    spec = learner_spec(
        ModelConfig(**path, **options.get("model", {})),
        sizes=None if path else SIZES | options.get("sizes", {}),
        learner=config,
        master_dtype=torch.float32,
    )
    return closing(Learner(spec, rank=rank, address="127.0.0.1", port=port))


def random_part(name, tensor):
    """Give every element a value that rounding changes, the same on all ranks; -0.0 among them."""
    torch.manual_seed(sum(map(ord, name)))
    full = torch.randn(tensor.shape)
    full.view(-1)[::7] = -0.0
    put(tensor, full)


def by_columns(policy):
    """Shard every matrix by its second dimension."""
    tensors = {
        name: t.detach().redistribute(placements=[Shard(1)]) if t.ndim > 1 else t
        for name, t in policy.tensors.items()
    }
    return dataclasses.replace(policy, tensors=tensors)


def expected(policy):
    """Gather every weight in the learner's dtype, add the whole product of its adapter, round the sum.

    Returns also whether rounding changed anything.
    """
    found, is_rounded = {}, False

    def whole(tensor):
        return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()

    for name, piece in policy.pieces.items():
        full = whole(policy.tensors[piece.weight])
        if piece.weight in policy.adapters:
            adapter = policy.adapters[piece.weight]
            full = full.float() + adapter.scale * (whole(adapter.up) @ whole(adapter.down))
        rounded = full.to(policy.published_dtype)
        is_rounded |= not torch.equal(rounded.to(full.dtype), full)
        found[name] = piece.of(rounded).clone()
    return found, is_rounded


def gathered(policy, rank, max_bytes, to):
    # Most parts are sent in messages of several, or in the last case by themselves.
    buckets.DIRECT_BYTES = 300 if max_bytes == max(BUCKET_BYTES) else 3000
    gatherer = BucketGatherer(policy, rank=rank)
    plan = plan_buckets(outgoing.tensor_specs(policy), max_bytes=max_bytes)
    return [gatherer.gather([spec.name for spec in bucket], to=to) for bucket in plan]


def check_divisions(policy, rank):
    """Compare the box of this rank, among those of all ranks of its copy, with torch's own."""
    for tensor in policy.tensors.values():
        division = divide(tensor, rank)
        own, begin = own_part(tensor)
        assert division.boxes[division.ranks.index(rank)] == Box(begin, tuple(own.shape)) or not own.numel()
        covered = torch.zeros(tensor.shape, dtype=torch.int64)
        for box in division.boxes:
            covered[box.slices([0] * tensor.ndim)] += 1
        assert bool((covered == 1).all())


def play(rank, scenes, ports, folder):
    """Play the scenes; rank 0 writes what it found, and the others that they got nothing."""
    facts = {}
    for scene in scenes:
        with learner(scene, rank, ports.pop(0), folder) as one:
            policy = one._policy
            for name, tensor in policy.tensors.items():
                random_part(name, tensor)
            for name, adapter in policy.adapters.items():
                random_part(name + "up", adapter.up)
            if SCENES[scene].get("redistribute"):
                policy = by_columns(policy)
            wanted, is_rounded = expected(policy)
            got = {n: t.clone() for n, t in policy.full_tensors(list(policy.pieces))}
            check_divisions(policy, rank)
            sent = {size: gathered(policy, rank, size, to=0) for size in BUCKET_BYTES}
            elsewhere = gathered(policy, rank, BUCKET_BYTES[1], to=LAST)
            if rank == LAST:
                assert torch.equal(torch.cat(elsewhere), flatten(list(wanted.values())))
            else:
                assert all(bucket is None for bucket in elsewhere)
            outgoing.export(
                policy, one.place, one._spec.model, folder / "out" / scene, max_file_bytes=FILE_BYTES
            )
            if rank:
                assert all(bucket is None for found in sent.values() for bucket in found)
                continue
            all_bytes = flatten(list(wanted.values()))
            facts[scene] = {
                "is_rounded": is_rounded,
                "wrong": [n for n, t in wanted.items() if not torch.equal(bits(got[n]), bits(t))],
                "buckets": {
                    size: [len(found), torch.equal(torch.cat(found), all_bytes)]
                    for size, found in sent.items()
                },
                "files": compare_files(policy, wanted, folder / "out" / scene),
            }
    if ports:
        with learner("rounded", rank, ports.pop(0), folder) as one:
            facts["refused"] = refuse(one, rank, folder / "out" / "refused")
    if rank == 0:
        (folder / f"{scenes[0]}.json").write_text(json.dumps(facts))


def compare_files(policy, wanted, folder):
    """Return for each file whether it is what safetensors writes of the same weights."""
    plan = outgoing.plan_files(outgoing.tensor_specs(policy), max_bytes=FILE_BYTES)
    return {
        file: (folder / file).read_bytes() == save({n: wanted[n] for n in names}, metadata={"format": "pt"})
        for file, names in plan.items()
    }


def refuse(one, rank, folder):
    """Export while the kernel refuses rank 1 to write, then once more; return what was there after each."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(DiskError, match=r"could not be written to .*refused: .*File too large"):
            one.export(str(folder))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        one.export(str(folder))  # it is rank 1 that raises
    torch.distributed.barrier()
    after = sorted(path.name for path in folder.parent.glob("*refused*"))
    torch.distributed.barrier()
    one.export(str(folder))
    return [after, sorted(path.name for path in folder.parent.glob("*refused*"))]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    for name, more in {"qwen3": {}, "odd qwen3": {"intermediate_size": 46}}.items():
        AutoModelForCausalLM.from_config(
            Qwen3Config(**tiny_sizes(VOCABULARY, head_dim=8, **more)), dtype=torch.float32
        ).save_pretrained(folder / name)
    write_experts(folder / "experts")
    for number in (4, 6):
        write_experts(folder / f"{number} experts", num_experts=number)
    run_program(__file__, folder, *reserved_ports(len(SCENES) + 1), timeout_s=TIMEOUT_S)
    found = {}
    for part in folder.glob("*.json"):
        found |= json.loads(part.read_text())
    return found


@pytest.mark.parametrize("scene", SCENES)
def test_gathered_and_written_parts_are_the_whole_weights_rounded_once(facts, scene):
    found = facts[scene]
    assert found["wrong"] == []
    assert found["is_rounded"] == ("dtype" in SCENES[scene].get("model", {}))
    (most, _), (some, _), (one, _) = found["buckets"].values()
    assert most > some > one == 1
    assert all(is_equal for _, is_equal in found["buckets"].values())
    assert len(found["files"]) > 1
    assert all(found["files"].values())


def test_a_rank_that_cannot_write_leaves_no_folder(facts):
    assert facts["refused"] == [[], ["refused"]]


def main(folder, *ports):
    ports = [*map(int, ports)]
    together = [scene for scene in SCENES if not any(scene in scenes for scenes in APART)]
    failed = 0
    for scenes in (together, *APART):
        own = [ports.pop() for _ in scenes] + ([ports.pop()] if scenes is together else [])
        failed += run_ranks((play, (rank, scenes, [*own], Path(folder))) for rank in range(WORLD_SIZE))
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
