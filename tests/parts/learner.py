"""What tests of the learner start from: sizes of a tiny model, random samples, a learner alone in this
process, free ports.

This folder is on the import path of pytest, and of its files that are started as programs: the ranks of a
world.
"""

from contextlib import closing, contextmanager

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner, LearnerSpec
from agentrl.learner.packing import pack
from agentrl.learner.ranks import leave_ranks
from agentrl.ports import ReservedPort


def tiny_sizes(vocab_size, **changes):
    """Return the sizes of a Qwen2 of two layers, whose weights are so large that it is far from uniform.

    `intermediate_size=47` makes the shards of ranks differ in size.
    """
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return sizes | {"intermediate_size": 48, "tie_word_embeddings": True, "initializer_range": 0.2} | changes


def write_tiny_model(folder, vocab_size, **changes):
    """Write a random model of `tiny_sizes`, in float32; the same whenever it is written."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen2Config(**tiny_sizes(vocab_size, **changes)), dtype=torch.float32
    ).save_pretrained(folder)


def learner_spec(model=None, *, sizes=None, lr=1e-2, **changes):
    """Return the spec of a learner of `model`, or else of a new one of `sizes`, in float64; `changes` are
    fields of LearnerSpec.
    """
    new = {} if sizes is None else {
        "from_scratch": ModelFromScratchConfig(architecture="qwen2", sizes=sizes),
        "master_dtype": torch.float64,
    }  # fmt: skip
    defaults = {
        "learner": LearnerConfig(optimizer=OptimizerConfig(lr=lr)), "algorithm": AlgorithmConfig(),
        "mode": "decoupled", "seed": 3, "temperature": 0.8, "total_updates": 10,
    }  # fmt: skip
    return LearnerSpec(model or ModelConfig(), **(defaults | new | changes))


def update_once(learner, vocabulary):
    """Make one update on a few random samples."""
    [shard] = pack(random_samples(7, vocabulary), max_tokens=1000, world_size=1)
    learner.update(learner.score(shard))


def random_samples(count, vocabulary, *, length=None, seed=5):
    """Return samples of 6 to 17 tokens (or of `length`): a context token, then about six actions in ten, the
    last token one of them.
    """
    rng, found = np.random.default_rng(seed), []
    for index in range(count):
        num_tokens = length or int(rng.integers(6, 18))
        mask = rng.random(num_tokens) < 0.6
        mask[0], mask[-1] = False, True
        behavior, advantages = (
            rng.normal(-3, 1, num_tokens).astype(np.float32),
            rng.normal(size=num_tokens).astype(np.float32),
        )
        found.append(
            Sample(
                index,
                rng.integers(0, vocabulary, num_tokens).astype(np.int32),
                mask,
                mask,
                behavior,
                advantages,
            )
        )
    return found


@contextmanager
def lone_learner(spec):
    """Start the learner of `spec` as the only rank of its world, and leave that world in any case."""
    try:
        with closing(Learner(spec, rank=0, address="127.0.0.1", port=reserved_port())) as learner:
            yield learner
    finally:
        if torch.distributed.is_initialized():  # a learner that could not be built closes nothing
            leave_ranks()


def reserved_port():
    """Return a port of this machine on which nobody listens; until this process ends, nobody else is given
    it.
    """
    [port] = reserved_ports(1)
    return port


def reserved_ports(count):
    """Return different ports of this machine; see `reserved_port`."""
    ports = [ReservedPort() for _ in range(count)]  # torch listens on all addresses of the machine
    RESERVED.extend(ports)
    return [port.number for port in ports]


RESERVED: list[ReservedPort] = []
"""What this process holds: a port is free again when it ends."""
