"""Transport `tensor` from the device: what another process on it reads is what the learner publishes."""

import base64
import json
import pickle
import subprocess
import sys
import time

import pytest

from agentrl.learner.buckets import plan_buckets
from parts.gpu import DEVICE, open_learner, samples_of, sized, step

RECEIVER = """
import base64, io, json, pickle, sys
import torch
from agentrl.sglang.process_group import tensor_checksum

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_on_the_device_gets_every_weight(model, measured, dtype):
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, DEVICE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with open_learner(model, dtype=dtype) as learner:
            for _ in range(2):  # what is sent follows the updates
                step(learner, samples_of([30, 12]))
                found, num_bytes = {}, 0
                started = time.perf_counter()
                for bucket in plan_buckets(learner.tensor_specs(), max_bytes=sized(2**24, 2**12)):
                    pickled = learner.pickle_bucket([spec.name for spec in bucket])
                    num_bytes += sum(spec.num_bytes for spec in bucket)
                    receiver.stdin.write(pickled + "\n")
                    receiver.stdin.flush()
                    found |= json.loads(receiver.stdout.readline())
                seconds = time.perf_counter() - started
                assert found == learner.checksums()
            measured |= {"MB": num_bytes / 1e6, "MB per s": num_bytes / 1e6 / seconds}
            assert all(not t.is_cuda for _, t in pickle.loads(base64.b64decode(pickled)))
    finally:
        receiver.stdin.close()
        receiver.wait(timeout=30)
