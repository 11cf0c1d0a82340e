"""Checks of a publish: that servers know the weights, and that a server has them.

`check_known`: before the first publish, by the model files that servers are started from.

`Verifier`: by checksums if possible, else by samples.

- The embedded server hashes each weight under its Hugging Face name.
- SGLang on a CPU hashes the bytes of each weight as stored, with several under one name (`qkv_proj`). The
learner hashes its own weights in the same layout.
- Any other server samples a few tokens, and the learner must compute the same log-probabilities for them. Its
checksums cannot be reproduced: on a GPU SGLang hashes with its own kernel, with tensor parallelism each rank
has only a part of a weight, and other layouts differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from safetensors import SafetensorError, safe_open

from agentrl.cluster.workers import Workers
from agentrl.errors import ConfigError, ServerError
from agentrl.learner.batch import Floats, Sample
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from agentrl.servers.client import SGLangClient
from agentrl.types import SamplingParams, TensorSpec
from agentrl.weights.transport import LearnerCalls

PROMPT = tuple(range(1, 9))
NUM_SAMPLED = 16
TOLERANCES = {"float32": 1e-3}
ROUNDED_TOLERANCE = 0.15
"""Mean absolute difference of log-probabilities, in nats.

bfloat16 rounding causes 0.01 on average; other weights differ by 1 and more.
"""

_OWN_DIGITS, _SGLANG_DIGITS = 64, 16
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Verifier:
    """Checks servers against one version of the learner's weights.

    is_alone: only a LoRA adapter was published. temperature: of the rollout.
    """

    learner: LearnerCalls
    is_alone: bool
    temperature: float
    _expected: dict[tuple[str | None, bool], Mapping[str, str]] = field(default_factory=dict)
    _hashing: trio.Lock = field(default_factory=trio.Lock)

    async def sums_agree(self, server: SGLangClient) -> bool:
        """Compare checksums; return False if both sides do not compute the same ones.

        Raises:
            ServerError: the server has other weights.
        """
        info, got = await server.server_info(), await server.checksums()
        dtype = served_dtype(info)
        if all(len(value) == _OWN_DIGITS for value in got.values()):
            self._compare(server, await self._expect(dtype, is_fused=False), got)
            return True
        if not is_plain(info):
            return False
        expected = {
            name: value[:_SGLANG_DIGITS] for name, value in (await self._expect(dtype, is_fused=True)).items()
        }
        if set(expected) != set(got):
            return False
        self._compare(server, expected, got)
        return True

    async def samples_agree(self, server: SGLangClient, version: int) -> None:
        """Let the server sample a few tokens and the learner score them.

        Raises:
            ServerError: the log-probabilities differ, or the tokens are not of this version.
        """
        difference = await self.sampled_difference(server, version)
        dtype = served_dtype(await server.server_info())
        tolerance = TOLERANCES.get(dtype or "", ROUNDED_TOLERANCE)
        if not difference <= tolerance:
            raise ServerError(
                f"{server.url} reports log-probabilities that differ from the learner's by "
                f"{difference:.2g} on average, more than {tolerance:g}: it does not have the "
                f"weights of version {version}"
            )

    async def sampled_difference(self, server: SGLangClient, version: int) -> float:
        """Let the server sample a few tokens; return the mean absolute difference between its
        log-probabilities and the learner's, in nats.

        Raises:
            ServerError: the tokens are not of this version.
        """
        params = SamplingParams(NUM_SAMPLED, temperature=self.temperature)
        sampled = await server.generate(PROMPT, params, rid=f"verify-{version}")
        if not len(sampled.token_ids) or set(sampled.versions.tolist()) != {version}:
            raise ServerError(
                f"{server.url} sampled no tokens of version {version} for the check, but tokens of "
                f"{sampled.versions.tolist()}"
            )
        own = await self.learner.call(
            partial(policy_logprobs, self.learner.learner, PROMPT, sampled.token_ids.tolist())
        )
        return float(np.abs(own - sampled.logprobs).mean())

    async def _expect(self, dtype: str | None, *, is_fused: bool) -> Mapping[str, str]:
        key = (dtype, is_fused)
        async with self._hashing:  # several servers ask at once, and the learner hashes once
            if key not in self._expected:
                if self.is_alone:
                    self._expected[key] = await self.learner.run(Learner.adapter_checksums)
                else:
                    self._expected[key] = await self.learner.run(Learner.checksums, dtype, is_fused)
            return self._expected[key]

    @staticmethod
    def _compare(server: SGLangClient, expected: Mapping[str, str], got: Mapping[str, str]) -> None:
        wrong = sorted(name for name in expected if name in got and got[name] != expected[name])
        missing = sorted(set(expected) - set(got))
        if wrong or missing:
            raise ServerError(
                f"{server.url}: {len(wrong)} tensors differ and {len(missing)} are missing, first: "
                f"{(wrong + missing)[0]}"
            )


def policy_logprobs(learner: Workers[Learner], prompt: Sequence[int], output: Sequence[int]) -> Floats:
    """Return the policy's log-probabilities of the tokens of `output` after `prompt`, at the rollout's
    temperature.
    """
    ids = np.array([*prompt, *output], np.int32)
    is_action = np.arange(len(ids)) >= len(prompt)
    nothing = np.zeros(len(ids), np.float32)
    sample = Sample(0, ids, is_action, is_action, nothing, nothing)
    shards = pack([sample], max_tokens=len(ids), world_size=learner.dp_size, may_split=False)
    microbatches = [microbatch for shard in shards for microbatch in shard]
    scored = learner.run(Learner.own_logprobs, microbatches)
    return next(
        values for microbatch, values in zip(microbatches, scored, strict=True) if not microbatch.is_filler
    )


def served_dtype(info: Mapping[str, Any]) -> str | None:
    """Return the dtype that a server was configured with; None if it uses that of the files."""
    return info.get("dtype") if info.get("dtype") in _DTYPES else None


def is_plain(info: Mapping[str, Any]) -> bool:
    """Return whether an SGLang server's checksums cover plain bytes: unquantized, unsharded weights on a
    CPU.
    """
    sizes: Sequence[str] = ("tp_size", "pp_size", "ep_size")
    return (
        info.get("device") == "cpu"
        and info.get("quantization") is None
        and all(info.get(name) in (None, 0, 1) for name in sizes)
    )


def check_known(specs: Sequence[TensorSpec], folder: Path) -> None:
    """Compare the weights to be published with the model files. No check if the folder has no safetensors.

    SGLang silently skips an unknown name, and its scheduler crashes on an unexpected shape.

    Raises:
        ConfigError: a weight is not in the files, or has another shape there.
    """
    known = read_shapes(folder)
    if not known:
        return
    for spec in specs:
        # Files of a base model lack the prefix of the class with a head. Servers add it, as transformers
        # does.
        shape = known.get(spec.name) or known.get(spec.name.partition(".")[2])
        if shape is None:
            near = get_close_matches(spec.name, known, n=1, cutoff=0) or ["nothing"]
            problem = (
                f"which its files do not contain (nearest: {near[0]}), so servers would skip it and keep the "
                "old weights"
            )
        elif shape != spec.shape:
            problem = f"which has the shape {list(shape)} in its files, so servers could not load it"
        else:
            continue
        raise ConfigError(
            f"{folder}: the learner would publish {spec.name} {list(spec.shape)}, {problem}; this model "
            "cannot be trained"
        )


def read_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return {name: shape} of all weights in the safetensors of a folder, from the file headers.

    Raises:
        ConfigError: a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="numpy") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} is not a safetensors file: its header cannot be read ({error})"
            ) from error
    return shapes
