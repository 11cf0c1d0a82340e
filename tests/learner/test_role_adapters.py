"""Adapters of roles: in one forward, each computes and learns as it would alone; by any number of ranks."""

import dataclasses
import json
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import MAX_ADAPTERS
from agentrl.config.schema import Config
from agentrl.learner.batch import Microbatch
from agentrl.learner.learner import Learner
from agentrl.learner.lora import adapter_tensors
from agentrl.learner.packing import pack
from agentrl.learner.sharding import gather
from parts.learner import learner_spec, lone_learner, random_samples, reserved_port, tiny_sizes
from parts.ranks import run_program, run_ranks

VOCABULARY = 61
SIZES = tiny_sizes(VOCABULARY, intermediate_size=47)
ROLES = {"worker": ("worker", "helper"), "critic": ("judge",)}
SPEAKERS = ("main", "worker", "judge", "planner", "helper")
ADAPTER_OF = {"worker": "worker", "helper": "worker", "judge": "critic", "main": None, "planner": None}
TIMEOUT_S = 120.0
ATOL = 1e-10


def spec(world_size=1, *, roles=ROLES, checkpointing=False, **changes):
    learner = LearnerConfig(
        world_size=world_size,
        collective_timeout_s=TIMEOUT_S,
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        gradient_checkpointing=checkpointing,
    )
    model = ModelConfig(lora=LoRAConfig(rank=3, alpha=6.0, roles=roles))
    return learner_spec(model, sizes=SIZES, learner=learner, algorithm=AlgorithmConfig(), **changes)


@contextmanager
def learner(**options):
    with lone_learner(spec(**options)) as one:
        yield one


def samples(speakers=SPEAKERS, count=11):
    """Return samples of which each is said by one of the speakers in turn; the first has two segments."""
    found = [
        dataclasses.replace(sample, segment_names=(speakers[index % len(speakers)],))
        for index, sample in enumerate(random_samples(count, VOCABULARY))
    ]
    first, second = found[0], found[1]
    columns = {
        field.name: torch.cat([torch.as_tensor(getattr(one, field.name)) for one in (first, second)]).numpy()
        for field in dataclasses.fields(first)
        if hasattr(getattr(first, field.name), "dtype")
    }
    names = first.segment_names + second.segment_names
    both = dataclasses.replace(first, **columns, segment_starts=(0, first.num_tokens), segment_names=names)
    return [both, *found[2:]]


def microbatch_of(chosen) -> Microbatch:
    [[microbatch]] = pack(chosen, max_tokens=10_000, world_size=1)
    return microbatch


def train(one, rank=0, world_size=1, chosen=None, updates=3):
    shards = pack(chosen or samples(), max_tokens=40, world_size=world_size)
    return [one.update(one.score(shards[rank])) for _ in range(updates)]


def adapters_of(one):
    policy = one._policy
    return {
        role: {name: gather(tensor).clone() for name, tensor in adapter_tensors(own).items()}
        for role, own in {None: policy.adapters, **policy.role_adapters}.items()
    }


def scored(one, microbatch):
    policy = one._policy
    policy.module.train()
    for weight in policy.module.parameters():
        weight.grad = None
    return policy.score_actions(microbatch, temperature=0.8)


def gradients_of(one, role):
    policy = one._policy
    own = policy.adapters if role is None else policy.role_adapters[role]
    return {name: gather(tensor.grad) for name, tensor in adapter_tensors(own).items()}


# -------------------------------------------------------------------------------------------------------- law


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_adapter_computes_and_learns_in_a_mixture_as_it_would_alone(checkpointing):
    chosen = samples()
    with learner(checkpointing=checkpointing) as mixed:
        train(mixed)
        trained, mixture = adapters_of(mixed), microbatch_of(chosen)
        logprobs = scored(mixed, mixture)
        logprobs.sum().backward()
        found = {role: gradients_of(mixed, role) for role in trained}
    segments_T = np.repeat(np.arange(len(mixture.segment_names)), mixture.segment_lengths)
    speakers_A = [mixture.segment_names[place] for place in segments_T[mixture.predictor_positions]]
    assert set(speakers_A) == set(SPEAKERS)
    with learner(roles={}) as alone:
        for role, tensors in trained.items():
            with torch.no_grad():
                for name, tensor in adapter_tensors(alone._policy.adapters).items():
                    gather(tensor).copy_(tensors[name])
            own_A = torch.tensor([ADAPTER_OF[name] == role for name in speakers_A])
            same = scored(alone, mixture)
            torch.testing.assert_close(logprobs[own_A], same[own_A], rtol=0, atol=ATOL)
            assert (logprobs - same)[~own_A].abs().max() > 1e-3, "the adapters differ"
            same[own_A].sum().backward()
            for name, gradient in gradients_of(alone, None).items():
                torch.testing.assert_close(found[role][name], gradient, rtol=1e-9, atol=ATOL)


def test_without_a_word_of_a_role_its_adapter_stays_and_the_policys_learns_as_ever():
    with learner() as with_roles:
        begun = adapters_of(with_roles)
        train(with_roles, chosen=samples(("main", "planner")))
        ended = adapters_of(with_roles)
    with learner(roles={}) as alone:
        train(alone, chosen=samples(("main", "planner")))
        expected = adapters_of(alone)[None]
    for role in ROLES:
        assert all(torch.equal(begun[role][name], ended[role][name]) for name in ended[role])
    assert all(torch.equal(expected[name], ended[None][name]) for name in expected)


def test_all_begin_as_nothing_and_the_reference_is_the_base():
    with learner() as one:
        mixture = microbatch_of(samples())
        before = scored(one, mixture)
        train(one)
        assert (scored(one, mixture) - before).abs().max() > 0.05
        base = one._policy.without_adapters().score_actions(mixture, temperature=0.8)
        torch.testing.assert_close(base, before, rtol=0, atol=ATOL)


def test_a_checkpoint_holds_all_and_goes_on_where_it_was(tmp_path):
    with learner() as first:
        train(first, updates=2)
        first.save(str(tmp_path / "state"))
        later = train(first, updates=1)
        expected = adapters_of(first)
    with learner() as second:
        second.load(str(tmp_path / "state"))
        assert train(second, updates=1) == later
        found = adapters_of(second)
    for role, tensors in expected.items():
        assert all(torch.equal(tensors[name], found[role][name]) for name in tensors)


def test_what_is_published_is_one_folder_of_peft_for_each(tmp_path):
    with learner() as one:
        train(one)
        one.export_adapter(str(tmp_path / "out"))
        expected, checksums = adapters_of(one), one.adapter_checksums()
        assert one.adapter_names() == ("policy", "worker", "critic")
        assert sum(spec.num_bytes for spec in one.adapter_specs()) == sum(
            4 * tensor.numel() for tensors in expected.values() for tensor in tensors.values()
        )
    for role, tensors in expected.items():
        folder = tmp_path / "out" / (role or "")
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
        stored = load_file(folder / "adapter_model.safetensors")
        assert stored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(torch.tensor(stored[name]), tensor.float(), rtol=0, atol=0)
            assert f"{role or 'policy'}/{name}" in checksums


# ------------------------------------------------------------------------------------------------------ ranks

ONE_WORD = ("main",) * 10 + ("worker",)
"""Of a batch in which only one rank has tokens of a role, and none those of another."""


def play(rank, world_size, port, folder):
    with ExitStack() as stack:
        one = Learner(spec(world_size), rank=rank, address="127.0.0.1", port=port)
        stack.callback(one.close)
        facts = train(one, rank, world_size) + train(one, rank, world_size, samples(ONE_WORD))
        tensors = {
            f"{role}.{name}": tensor.numpy()
            for role, own in adapters_of(one).items()
            for name, tensor in own.items()
        }
    if rank == 0:
        save_file(tensors, str(folder / "adapters.safetensors"))
        (folder / "facts.json").write_text(json.dumps(facts))


def test_two_ranks_learn_as_one(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    play(0, 1, reserved_port(), folders[0])
    run_program(__file__, folders[1], reserved_port(), timeout_s=TIMEOUT_S)
    one, two = (json.loads((folder / "facts.json").read_text()) for folder in folders)
    for mine, other in zip(one, two, strict=True):
        assert other == pytest.approx(mine, rel=1e-9, abs=1e-11)
    ours, theirs = (load_file(folder / "adapters.safetensors") for folder in folders)
    for name, tensor in ours.items():
        assert theirs[name] == pytest.approx(tensor, rel=1e-6, abs=1e-8)


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("roles", "wrong"),
    [
        ({"policy": ["a"]}, "'policy' cannot be the name of an adapter"),
        ({"a/b": ["a"]}, "'a/b' cannot be the name of an adapter"),
        ({"a": []}, r"roles.a=\[\] speaks in no conversation"),
        ({"a": ["x", ""]}, r"roles.a=\['x', ''\]: a conversation has a name; remove ''"),
        ({"a": ["x"], "b": ["x"]}, "conversation 'x' has two adapters"),
    ],
)
def test_roles_that_mean_nothing_are_refused(roles, wrong):
    with pytest.raises(ValidationError, match=wrong):
        LoRAConfig(rank=3, roles=roles)
    with pytest.raises(ValidationError, match="rank=0 trains all weights"):
        LoRAConfig(roles={"a": ["x"]})


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({"learner": {"world_size": 2, "tensor_parallel": 2}}, "learner.tensor_parallel=2"),
        ({"learner": {"world_size": 2, "sequence_parallel": 2}}, "learner.sequence_parallel=2"),
        ({"learner": {"shared_prefix": True}}, "learner.shared_prefix=true"),
        ({"learner": {"compile": True}}, "learner.compile=true"),
        ({"rollout": {"weights": {"adapter": "merged"}}}, "a merged model has one adapter"),
        ({"rollout": {"weights": {"transport": "distributed"}}}, "adapters are sent only by disk"),
        ({"critic": {"model": {"lora": {"rank": 2, "roles": {"a": ["x"]}}}}}, "only the policy speaks"),
    ],
)
def test_combinations_that_are_not_supported_are_refused_by_name(sections, wrong):
    lora = {"lora": {"rank": 3, "roles": {"worker": ["worker"]}}}
    Config.model_validate({"model": lora})
    with pytest.raises(ValidationError, match=wrong):
        Config.model_validate({"model": lora, **sections})


def test_more_roles_than_the_embedded_server_holds_are_refused():
    roles = {f"role{number}": [f"speaker{number}"] for number in range(MAX_ADAPTERS)}
    lora = {"lora": {"rank": 3, "roles": roles}}
    Config.model_validate({"model": lora, "rollout": {"backend": "sglang"}})
    with pytest.raises(ValidationError, match=r"rollout\.backend=embedded"):
        Config.model_validate({"model": lora})


if __name__ == "__main__":
    folder, port = sys.argv[1:]
    sys.exit(run_ranks((play, (rank, 2, int(port), Path(folder))) for rank in range(2)))
