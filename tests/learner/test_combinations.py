"""Which ways to spread the learner combine, pair by pair: each pair makes the updates of one rank, or is
refused; docs/cluster.md has the same table.

The file is also the program that forks the ranks of each world.
"""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.config.learner import LearnerConfig, OptimizerConfig, refuse_shared_prefix
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from parts.experts import VOCABULARY, write_experts
from parts.learner import learner_spec, random_samples, reserved_ports, write_tiny_model
from parts.ranks import run_program, run_ranks

PAGE = Path(__file__).parents[2] / "docs/cluster.md"
TIMEOUT_S = 300.0
WORLD_SIZE = 4
WAYS = {
    "HSDP": {"fsdp": {"shard_size": 2}},
    "sequence parallel": {"sequence_parallel": 2},
    "tensor parallel": {"tensor_parallel": 2},
    "expert parallel": {"expert_parallel": 2},
    "LoRA": {},
    "compile": {"compile": True},
    "checkpointing": {"gradient_checkpointing": True, "activation_offload": True},
    "offload": {"offload": "parameters"},
    "shared prefix": {"shared_prefix": True},
}
"""A way by its name on the page, with its settings of LearnerConfig. Experts are of a model of their own, and
what is compiled has a single layer: compiling takes half a minute per rank.
"""
PAIRS = [*itertools.combinations(WAYS, 2)]


def samples():
    """Return samples of which every three begin with the same tokens, as the attempts of a group do."""
    found = random_samples(9, VOCABULARY, length=14)
    for sample in found:
        first = found[sample.index // 3 * 3]
        sample.token_ids[:4] = first.token_ids[:4]
        sample.action_mask[:4] = False
        sample.action_mask[4] = True
    return [dataclasses.replace(s, loss_mask=s.action_mask) for s in found]


SAMPLES = samples()


def settings(ways, models, *, world_size=WORLD_SIZE):
    """Return model and learner of a world with these ways.

    Raises:
        ConfigError, ValidationError, ValueError: they do not combine.
    """
    options = {"world_size": world_size, "collective_timeout_s": TIMEOUT_S}
    for way in ways:
        options |= WAYS[way]
    name = "experts" if "expert parallel" in ways else "shallow" if "compile" in ways else "dense"
    lora = LoRAConfig(rank=4, alpha=8.0) if "LoRA" in ways else LoRAConfig()
    learner = LearnerConfig(**options, optimizer=OptimizerConfig(lr=1e-2, eps=1e-3))
    model = ModelConfig(path=str(models / name), lora=lora)
    refuse_shared_prefix(model, learner)
    check_folder(model, learner)
    return model, learner


def refusal(pair, models):
    """Return why a pair is refused, in one line; None if it is not."""
    try:
        settings(pair, models)
    except (ConfigError, ValidationError, ValueError) as error:
        return re.sub(r"\s+", " ", str(error))
    return None


def alone(pair):
    """Return the ways that decide the model of the one rank to compare with."""
    return tuple(way for way in pair if way in ("LoRA", "expert parallel", "compile"))


def accepted(models):
    return [pair for pair in PAIRS if refusal(pair, models) is None]


# -------------------------------------------------------------------------------------- the program of a rank


def play(rank, model, learner, port, out):
    """Make two updates on one rank; rank 0 writes what it saw."""
    one = Learner(learner_spec(model, learner=learner), rank=rank, address="127.0.0.1", port=port)
    shards = pack(
        SAMPLES,
        max_tokens=45,
        world_size=learner.dp_size,
        shared_prefix=one.shared_prefix(),
    )
    shard = shards[rank // learner.num_replicas]
    updates = [one.update(one.score(shard)) for _ in range(2)]
    names = [
        name for name in one._policy.pieces if "embed" in name or "down_proj" in name or "q_proj" in name
    ]
    weights = {name: tensor.double().norm().item() for name, tensor in one._policy.full_tensors(names)}
    one.close()
    if rank == 0:
        out.write_text(json.dumps({"updates": updates, "weights": weights}))


def main(models, folder):
    models, folder = Path(models), Path(folder)
    failed = 0
    for ways in sorted({alone(pair) for pair in accepted(models)}):
        model, _ = settings(ways, models)
        optimizer = OptimizerConfig(lr=1e-2, eps=1e-3)
        learner = LearnerConfig(world_size=1, optimizer=optimizer, collective_timeout_s=TIMEOUT_S)
        [port] = reserved_ports(1)
        failed += run_ranks([(play, (0, model, learner, port, folder / f"{name_of(ways)}.json"))])
    for pair in accepted(models):
        model, learner = settings(pair, models)
        [port] = reserved_ports(1)
        out = folder / f"{'+'.join(pair)}.json"
        lost = run_ranks((play, (rank, model, learner, port, out)) for rank in range(WORLD_SIZE))
        if lost:
            print(f"{pair}: {lost} ranks failed", file=sys.stderr, flush=True)
        failed += lost
    return failed


def name_of(ways):
    return "+".join(("one", *ways))


# ------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "dense", VOCABULARY)
    write_tiny_model(folder / "shallow", VOCABULARY, num_hidden_layers=1)
    write_experts(folder / "experts", num_experts=4)
    return folder


@pytest.fixture(scope="module")
def worlds(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    run_program(__file__, models, folder, timeout_s=6 * TIMEOUT_S)
    return folder


def table():
    """Return {(way, way): cell} of the table in the page's section on parallelism."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Parallelism\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    head, _, *body = rows
    return {
        (head[column], row[0]): cell for row in body for column, cell in enumerate(row) if column and cell
    }


def test_the_page_says_what_is_refused(models):
    cells = table()
    assert set(cells) == set(PAIRS)
    for pair in PAIRS:
        why = refusal(pair, models)
        assert cells[pair] == ("yes" if why is None else "no"), (pair, why)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_refusal_names_both_and_what_to_do(models, pair):
    """Where a pair is not refused, the slow test plays it."""
    why = refusal(pair, models)
    if why is not None:
        assert re.search(r"; (use|leave one of the two out)", why), why
        assert len(why) < 400


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_every_other_pair_makes_the_updates_of_one_rank(models, worlds):
    for pair in accepted(models):
        found = json.loads((worlds / f"{'+'.join(pair)}.json").read_text())
        expected = json.loads((worlds / f"{name_of(alone(pair))}.json").read_text())
        for one, more in zip(expected["updates"], found["updates"], strict=True):
            for key in ("loss", "grad_norm", "entropy"):
                assert more[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), (pair, key)
        assert expected["updates"][0]["grad_norm"] > 0
        assert found["weights"].keys() == expected["weights"].keys()
        np.testing.assert_allclose(
            [*found["weights"].values()], [*expected["weights"].values()], rtol=1e-4, err_msg=str(pair)
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
