"""Verification that a server has the published weights: by checksums if possible, else by samples.

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
from typing import Any, Literal

import numpy as np

from agentrl.errors import ServerError
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import POLICY_ADAPTER, adapter_tensor
from agentrl.types import SamplingParams
from agentrl.weights.attempt import LearnerCalls

PROMPT = tuple(range(1, 9))
NUM_SAMPLED = 16
TOLERANCES = {"float32": 1e-3}
ROUNDED_TOLERANCE = 0.15
"""Mean absolute difference of log-probabilities, in nats.

bfloat16 rounding causes 0.01 on average; other weights differ by 1 and more.
"""

_OWN_DIGITS, _SGLANG_DIGITS = 64, 16
_DTYPES = ("float32", "bfloat16", "float16")

Kind = Literal["own", "fused", "sampled"]


@dataclass
class Verifier:
    """Checks servers against one version of the learner's weights.

    is_alone: only a LoRA adapter was published. temperature: of the rollout.
    """

    learner: LearnerCalls
    is_alone: bool
    temperature: float
    _expected: dict[tuple[str | None, bool], Mapping[str, str]] = field(default_factory=dict)

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
        expected = {name: value[:_SGLANG_DIGITS] for name, value in (await self._expect(dtype, is_fused=True)).items()}
        if set(expected) != set(got):
            return False
        self._compare(server, expected, got)
        return True

    async def samples_agree(self, server: SGLangClient, version: int) -> None:
        """Let the server sample a few tokens and the learner score them.

        Raises:
            ServerError: the log-probabilities differ, or the tokens are not of this version.
        """
        params = SamplingParams(NUM_SAMPLED, temperature=self.temperature)
        sampled = await server.generate(PROMPT, params, rid=f"verify-{version}")
        if not len(sampled.token_ids) or set(sampled.versions.tolist()) != {version}:
            raise ServerError(f"{server.url} sampled no tokens of version {version} to check it by, but {sampled.versions.tolist()}")
        own = await self.learner.call(self.learner.source.score, [*PROMPT, *sampled.token_ids.tolist()], len(PROMPT))
        difference = float(np.abs(np.asarray(own) - sampled.logprobs).mean())
        dtype = served_dtype(await server.server_info())
        tolerance = TOLERANCES.get(dtype or "", ROUNDED_TOLERANCE)
        if not difference <= tolerance:
            raise ServerError(
                f"{server.url} gives its own tokens log-probabilities that are {difference:.2g} off the learner's on average, "
                f"more than {tolerance:g}: it does not have the weights of version {version}"
            )

    async def _expect(self, dtype: str | None, *, is_fused: bool) -> Mapping[str, str]:
        key = (dtype, is_fused)
        if key not in self._expected:
            source = self.learner.source
            if self.is_alone:
                sums = await self.learner.call(source.adapter_checksums)
                self._expected[key] = {adapter_tensor(POLICY_ADAPTER, name): value for name, value in sums.items()}
            else:
                self._expected[key] = await self.learner.call(source.checksums, dtype, is_fused)
        return self._expected[key]

    @staticmethod
    def _compare(server: SGLangClient, expected: Mapping[str, str], got: Mapping[str, str]) -> None:
        wrong = sorted(name for name in expected if name in got and got[name] != expected[name])
        missing = sorted(set(expected) - set(got))
        if wrong or missing:
            raise ServerError(f"{server.url}: {len(wrong)} tensors differ and {len(missing)} are missing, first: {(wrong + missing)[0]}")


def served_dtype(info: Mapping[str, Any]) -> str | None:
    """Return the dtype that a server was configured with; None if it uses that of the files."""
    return info.get("dtype") if info.get("dtype") in _DTYPES else None


def is_plain(info: Mapping[str, Any]) -> bool:
    """Return whether an SGLang server's checksums cover plain bytes: unquantized, unsharded weights on a CPU."""
    sizes: Sequence[str] = ("tp_size", "pp_size", "ep_size")
    return info.get("device") == "cpu" and info.get("quantization") is None and all(info.get(name) in (None, 0, 1) for name in sizes)
