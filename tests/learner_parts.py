"""What tests of the learner start from: sizes of a tiny model, random samples, a learner alone in this process, free ports.

This folder is on the import path of pytest, and of its files that are started as programs: the ranks of a world.
"""

import socket
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.learner.ranks import leave_ranks


def tiny_sizes(vocab_size, **changes):
    """Return the sizes of a Qwen2 of two layers, whose weights are so large that it is far from uniform.

    `intermediate_size=47` makes the shards of ranks differ in size.
    """
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return sizes | {"intermediate_size": 48, "tie_word_embeddings": True, "initializer_range": 0.2} | changes


def write_tiny_model(folder, vocab_size, **changes):
    """Write a random model of `tiny_sizes`, in float32; the same whenever it is written."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**tiny_sizes(vocab_size, **changes)), dtype=torch.float32).save_pretrained(folder)


def update_once(learner, vocabulary):
    """Make one update on a few random samples."""
    [shard] = pack(random_samples(7, vocabulary), max_tokens=1000, world_size=1)
    learner.update(learner.score(shard))


def random_samples(count, vocabulary, *, length=None, seed=5):
    """Return samples of 6 to 17 tokens (or of `length`): a context token, then about six actions in ten, the last token one of them."""
    rng, found = np.random.default_rng(seed), []
    for index in range(count):
        num_tokens = length or int(rng.integers(6, 18))
        mask = rng.random(num_tokens) < 0.6
        mask[0], mask[-1] = False, True
        behavior, advantages = rng.normal(-3, 1, num_tokens).astype(np.float32), rng.normal(size=num_tokens).astype(np.float32)
        found.append(Sample(index, rng.integers(0, vocabulary, num_tokens).astype(np.int32), mask, mask, behavior, advantages))
    return found


@contextmanager
def lone_learner(spec):
    """Start the learner of `spec` as the only rank of its world, and leave that world in any case."""
    try:
        with closing(Learner(spec, rank=0, address="127.0.0.1", port=free_port())) as learner:
            yield learner
    finally:
        if torch.distributed.is_initialized():  # a learner that could not be built closes nothing
            leave_ranks()


def free_port():
    """Return a port of this machine that nobody listens on."""
    [port] = free_ports(1)
    return port


def free_ports(count):
    """Return different ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
