"""What the checks on a GPU share: the device, sizes for it, distances, and what one update does.

`AGENTRL_GPU_DEVICE=cpu` runs the same checks in small on a CPU, to prove that they run.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.sharding import gather
from parts.learner import learner_spec, lone_learner

DEVICE = os.environ.get("AGENTRL_GPU_DEVICE", "cuda")
IS_GPU = DEVICE == "cuda"

MICROBATCH_TOKENS = 4096 if IS_GPU else 64
BETAS = (0.9, 0.999)

FACTOR = 3.0
"""A device may be this many times as far from the float64 result as the CPU is in the same dtype. Kernels
round the same numbers, but add them in another order.
"""
FLOORS = {"float32": 5e-6, "bfloat16": 2.0**-8}
"""Relative errors below which their ratio means nothing: some roundings of one number. On a GPU, attention in
float32 is computed by tensor cores, in three parts of fewer digits each.
"""


class OnDevice(EmbeddedServer):
    """The embedded server on the device of the suite, on machines with a GPU, too."""

    def environment(self):
        return super().environment() | ({} if IS_GPU else {"CUDA_VISIBLE_DEVICES": ""})


def sized(on_gpu, on_cpu):
    return on_gpu if IS_GPU else on_cpu


VOCABULARY = sized(8192, 67)
SIZES = sized(
    {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8},
    {"intermediate_size": 48},
)
"""Changes of `parts.learner.tiny_sizes`."""


def samples_of(lengths, vocabulary=VOCABULARY, *, seed=5):
    """Return one sample per length; about six tokens in ten are actions, the last one is."""
    rng = np.random.default_rng(seed)
    found = []
    for index, length in enumerate(lengths):
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        behavior = rng.normal(-np.log(vocabulary), 0.5, length).astype(np.float32)
        advantages = rng.normal(size=length).astype(np.float32)
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        found.append(Sample(index, ids, mask, mask, behavior, advantages))
    return found


def random_lengths(total, *, seed=3):
    """Return lengths that sum to about `total`, many short ones and few long ones, among them odd ones."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(int(np.clip(rng.exponential(total / 12), 3, total / 3)))
    return lengths


def packed(learner, samples):
    [shard] = pack(
        samples,
        max_tokens=MICROBATCH_TOKENS,
        world_size=1,
        parity_tokens=learner.parity_tokens(),
        shared_prefix=learner.shared_prefix(),
    )
    return shard


@contextmanager
def open_learner(
    folder, *, device=DEVICE, dtype="float32", master=torch.float32, attention="auto", lora=0, **changes
):
    """Open the learner of one rank of the model in `folder`."""
    options = {
        "optimizer": OptimizerConfig(lr=1e-3, betas=BETAS, grad_clip=None),
        "microbatch_tokens": MICROBATCH_TOKENS,
        "threads": sized(8, 1),  # the oracle is the slowest part beside a GPU
        **changes,
    }
    model = ModelConfig(path=str(folder), dtype=dtype, attention=attention, lora=LoRAConfig(rank=lora))
    spec = learner_spec(
        model,
        learner=LearnerConfig(**options),
        # All terms of the loss: ratios, a reference, entropies.
        algorithm=AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01}),
        master_dtype=master,
        device=device,
    )
    with lone_learner(spec) as learner:
        yield learner


@dataclass(frozen=True, eq=False)
class StepFacts:
    """What one update computed, on the CPU in float64: per action token, per weight, and its metrics."""

    logprobs: torch.Tensor
    gradients: dict[str, torch.Tensor]
    changes: dict[str, torch.Tensor]
    metrics: dict[str, float]


def whole(tensor):
    return gather(tensor.detach()).to("cpu", torch.float64, copy=True)


def trained(learner):
    # FSDP's wrappers and compiled layers add nothing to the names.
    return {n: p for n, p in learner._policy.module.named_parameters() if p.requires_grad}


def step(learner, samples):
    """Make one update and return what it did."""
    before = {name: whole(weight) for name, weight in trained(learner).items()}
    scored = learner.score(packed(learner, samples))
    metrics = learner.update(scored)
    optimizer = learner._stepper.optimizer
    # After one step, AdamW's mean of the gradients is the gradient, but for a factor.
    gradients = {
        name: whole(optimizer.state[weight]["exp_avg"]) / (1 - BETAS[0])
        for name, weight in trained(learner).items()
    }
    changes = {name: whole(weight) - before[name] for name, weight in trained(learner).items()}
    logprobs = np.concatenate([s.proximal_logprobs for s in scored]).astype(np.float64)
    return StepFacts(torch.from_numpy(logprobs), gradients, changes, metrics)


def distance(found, expected):
    """Return |found - expected| / |expected| over all of one or many tensors."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        names = sorted(expected)
        found, expected = (torch.cat([d[n].flatten() for n in names]) for d in (found, expected))
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def is_near(error, of_cpu, dtype):
    return error <= FACTOR * of_cpu + FLOORS[dtype]


def logprobs_of(learner: Learner, prompt, output):
    """Return the learner's log-probabilities of `output` after `prompt`, f64[len(output)]."""
    ids = np.array([*prompt, *output], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    nothing = np.zeros(len(ids), np.float32)
    [shard] = pack([Sample(0, ids, mask, mask, nothing, nothing)], max_tokens=len(ids), world_size=1)
    [found] = learner.own_logprobs(shard)
    return np.asarray(found, np.float64)
