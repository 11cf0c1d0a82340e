"""Host memory that a rank of the learner needs to load its model, beside the part that it keeps.

    python benchmarks/load_memory.py --out docs/results/load_memory.json

measured: a random model of two billion weights, written to a temporary folder in bfloat16 and then in
float32, and loaded by 2 and by 4 ranks on gloo, each with float32 master weights. `whole` is the same with
transformers' `from_pretrained` on every rank, with a quarter of the layers: the whole model times the number
of ranks would not fit.

large: rank 0 of 64 and of 256 ranks in a fake process group, with the shapes of published models. Their
files are sparse: they have the right size and headers, and only zeros. A part above `--max-shard-gib` is
counted, not loaded.

Memory is the growth of the rank's peak resident set since just before it began to load, after a tiny model
was loaded, so that imports do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.distributed as dist
from machine import write_result
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.learner import sharding
from agentrl.learner.loading import Outline, outline
from agentrl.learner.ranks import join_ranks

GIB = 2**30
FILE_BYTES = 2**30
LARGE = {
    "32B (Qwen2.5)": Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "72B (Qwen2.5)": Qwen2Config(
        vocab_size=152064,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "235B-A22B (Qwen3)": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
}
TINY = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
DTYPES = {"bfloat16": "BF16", "float32": "F32"}


# ------------------------------------------------------------------------------------------------ checkpoints


def stored_shapes(config: Any) -> dict[str, list[int]]:
    """Return {name: shape} of a published folder: one matrix per expert, tied weights once."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, list[int]] = {}
    for name, weight in module.named_parameters():
        layer, _, own = name.rpartition(".")
        if own not in ("gate_up_proj", "down_proj") or not layer.endswith("experts"):
            shapes[name] = list(weight.shape)
            continue
        for expert in range(weight.shape[0]):
            rows, columns = weight.shape[1:]
            if own == "down_proj":
                shapes[f"{layer}.{expert}.down_proj.weight"] = [rows, columns]
            else:
                shapes[f"{layer}.{expert}.gate_proj.weight"] = [rows // 2, columns]
                shapes[f"{layer}.{expert}.up_proj.weight"] = [rows // 2, columns]
    return shapes


def in_files(shapes: dict[str, list[int]], itemsize: int) -> list[dict[str, list[int]]]:
    files: list[dict[str, list[int]]] = [{}]
    room = FILE_BYTES
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if files[-1] and size > room:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = shape
        room -= size
    return files


def write_folder(config: Any, folder: Path, dtype: str, *, is_sparse: bool) -> None:
    """Write a model, one file in memory at a time; a sparse one takes no room on the disk."""
    folder.mkdir()
    config.architectures = [type(outline_on_meta(config)).__name__]
    config.save_pretrained(folder)
    files = in_files(stored_shapes(config), getattr(torch, dtype).itemsize)
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, shapes in zip(names, files, strict=True):
        if is_sparse:
            write_sparse(folder / name, shapes, dtype)
        else:
            values = {
                own: torch.empty(shape, dtype=getattr(torch, dtype)).uniform_(-1, 1)
                for own, shape in shapes.items()
            }
            save_file(values, folder / name, metadata={"format": "pt"})
    weight_map = {own: name for name, shapes in zip(names, files, strict=True) for own in shapes}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def outline_on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def write_sparse(file: Path, shapes: dict[str, list[int]], dtype: str) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)


# ----------------------------------------------------------------------------------------------------- a rank


def load(path: Path, mesh: Any, learner: LearnerConfig, way: str) -> Outline:
    """Return the model, sharded; with `outlined` without its values."""
    model = ModelConfig(path=str(path))
    if way == "whole":
        module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        found = Outline(module)
    else:
        found = outline(AutoModelForCausalLM, model, attention="eager", dtype=torch.float32)
    sharding.shard(found.module, mesh, learner, compute_dtype=torch.bfloat16, has_backward=True)
    if way != "outlined":
        found.fill(torch.device("cpu"))
    return found


def run_rank(rank: int, world_size: int, port: int, folder: Path, way: str, max_shard_gib: float) -> None:
    """Load on one rank, and print what it took as JSON; port 0: a fake process group."""
    learner = LearnerConfig(world_size=world_size, collective_timeout_s=3000.0)
    if port:
        mesh = join_ranks(learner, rank=rank, address="127.0.0.1", port=port, on="cpu").mesh
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        mesh = sharding.open_mesh("cpu", world_size=world_size, shard_size=None)
    write_tiny = folder.parent / f"tiny_{os.getpid()}"
    write_folder(TINY, write_tiny, "float32", is_sparse=False)
    load(write_tiny, mesh, learner, "whole" if way == "whole" else "sliced")
    if not port:
        found = load(folder, mesh, learner, "outlined")
        shard = sum(sharding.own_part(p)[0].numel() * 4 for p in found.module.parameters())
        if shard > max_shard_gib * GIB:
            print(json.dumps({**described(found), "shard_bytes": shard, "is_loaded": False}))
            return
        del found
    memory_before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    started = time.process_time(), time.perf_counter()
    found = load(folder, mesh, learner, way)
    times = {"cpu_s": time.process_time() - started[0], "wall_s": time.perf_counter() - started[1]}
    growth = memory("VmHWM") - memory_before
    shard = sum(sharding.own_part(p)[0].numel() * 4 for p in found.module.parameters())
    print(
        json.dumps(
            {**described(found), "shard_bytes": shard, "is_loaded": True, "peak_bytes": growth, **times}
        )
    )


def described(found: Outline) -> dict[str, int]:
    weights = list(found.module.parameters())
    return {
        "weights": sum(weight.numel() for weight in weights),
        "largest_bytes": max(weight.numel() for weight in weights) * 4,
    }


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


# ------------------------------------------------------------------------------------------------------- main


def run_ranks(
    folder: Path, world_size: int, way: str, *, is_fake: bool = False, max_shard_gib: float = 0.0
) -> dict[str, Any]:
    """Load with all ranks at once (only rank 0 of a fake group); return the largest of each figure."""
    port = 0 if is_fake else free_port()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--rank", str(rank), str(world_size), str(port), str(folder)),
                *(way, "--max-shard-gib", str(max_shard_gib)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1 if is_fake else world_size)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "a rank failed"
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    most = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    if most["is_loaded"]:
        most["times_shard"] = round(most["peak_bytes"] / most["shard_bytes"], 3)
        allowed = 1.3 * most["shard_bytes"] + most["largest_bytes"]
        most["share_of_allowed"] = round(most["peak_bytes"] / allowed, 3)
    result = {"ranks": world_size, "way": way, **most, "ideal_bytes": 4 * most["weights"] / world_size}
    print(json.dumps(result), flush=True)
    return result


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def sizes(layers: int, hidden: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=50_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--large", nargs="*", default=list(LARGE), help="of: " + ", ".join(LARGE))
    parser.add_argument("--large-ranks", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--max-shard-gib", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="for the models; default: a temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, world_size, port, folder, way = options.rank
        run_rank(int(rank), int(world_size), int(port), Path(folder), way, options.max_shard_gib)
        return
    measured, large = [], []
    with TemporaryDirectory(dir=options.folder) as temporary:
        for dtype in options.dtypes:
            for layers, runs in (
                (max(1, options.layers // 4), [(2, "whole"), (2, "sliced")]),
                (options.layers, [(2, "sliced"), (4, "sliced")]),
            ):
                folder = Path(temporary) / "model"
                write_folder(sizes(layers, options.hidden), folder, dtype, is_sparse=False)
                for world_size, way in runs:
                    measured.append({"stored": dtype, **run_ranks(folder, world_size, way)})
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
        for name in options.large:
            folder = Path(temporary) / "large"
            write_folder(LARGE[name], folder, "bfloat16", is_sparse=True)
            for world_size in options.large_ranks:
                gib = min(options.max_shard_gib, psutil.virtual_memory().available / GIB / 2)
                one = run_ranks(folder, world_size, "sliced", is_fake=True, max_shard_gib=gib)
                large.append({"model": name, **one})
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    write_result(options.out, {"measured": measured, "large": large})


if __name__ == "__main__":
    main()
