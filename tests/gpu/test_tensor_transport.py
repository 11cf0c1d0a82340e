"""Transport `tensor` from the device: what another process on it reads is what the learner publishes."""

import base64
import json
import pickle
import subprocess
import sys
import time
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch.multiprocessing

from agentrl.learner.buckets import plan_buckets
from parts.gpu import DEVICE, IS_GPU, open_learner, samples_of, sized, step

RECEIVER = """
import base64, io, json, pickle, sys
import torch
from agentrl.servers.process_group import tensor_checksum

class Reader(pickle.Unpickler):
    # SGLang's unpickler allows modules of torch and the standard library, and refuses all else.
    def find_class(self, module, name):
        if module.split(".")[0] not in ("torch", "collections", "builtins", "_codecs"):
            raise pickle.UnpicklingError(f"{module}.{name} is refused")
        return super().find_class(module, name)

for line in sys.stdin:
    named = Reader(io.BytesIO(base64.b64decode(line))).load()
    on_device = {name: tensor.to(sys.argv[1]) for name, tensor in named}
    print(json.dumps({name: tensor_checksum(tensor) for name, tensor in on_device.items()}), flush=True)
"""


@pytest.fixture
def receive():
    """Send a pickle in base64 to another process, and return the checksums of what it reads from it."""
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, DEVICE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def send(pickled):
        receiver.stdin.write(pickled + "\n")
        receiver.stdin.flush()
        return json.loads(receiver.stdout.readline())

    yield send
    receiver.stdin.close()
    receiver.wait(timeout=30)


def buckets_of(learner):
    plan = plan_buckets(learner.tensor_specs(), max_bytes=sized(2**24, 2**12))
    return [[spec.name for spec in bucket] for bucket in plan]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_on_the_device_gets_every_weight(model, receive, measured, dtype):
    with open_learner(model, dtype=dtype) as learner:
        num_bytes = sum(spec.num_bytes for spec in learner.tensor_specs())
        for _ in range(2):  # what is sent follows the updates
            step(learner, samples_of([30, 12]))
            found, started = {}, time.perf_counter()
            for names in buckets_of(learner):
                pickled = learner.pickle_bucket(names)
                found |= receive(pickled)
            measured["MB per s"] = num_bytes / 1e6 / (time.perf_counter() - started)
            assert found == learner.checksums()
        assert all(not t.is_cuda for _, t in pickle.loads(base64.b64decode(pickled)))


def test_another_process_on_the_device_opens_handles_of_its_memory(model, receive, measured, request):
    """What CUDA IPC, or shared memory on a CPU, would give the transport: handles in place of the data.

    The transport does not use it. This shows that it works between two processes, and at which rate.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()
    request.addfinalizer(partial(torch.multiprocessing.set_sharing_strategy, strategy))
    torch.multiprocessing.set_sharing_strategy("file_system")  # descriptors are not sent in a message
    with open_learner(model, dtype="bfloat16") as learner:
        found, started = {}, time.perf_counter()
        for names in buckets_of(learner):
            named = list(learner._policy.full_tensors(names))  # kept until the other process has read them
            handles = bytes(ForkingPickler.dumps(named))
            found |= receive(base64.b64encode(handles).decode())
            if IS_GPU:
                assert len(handles) < 2**10 * len(named) + 2**10, "no data"
        num_bytes = sum(spec.num_bytes for spec in learner.tensor_specs())
        measured["MB per s"] = num_bytes / 1e6 / (time.perf_counter() - started)
        assert found == learner.checksums()
