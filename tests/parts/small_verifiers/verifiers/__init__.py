"""A small package in the place of verifiers up to 0.1, which `make test` does not install. It has the same
entry points; tests/extras/hubs/test_real_verifiers.py has the real one.
"""

from __future__ import annotations

import os
import sys
import types as _types
from dataclasses import dataclass
from typing import Any

import openai


@dataclass
class ClientConfig:
    api_base_url: str
    api_key_var: str
    max_retries: int


class Rubric:
    def __init__(self, is_of_group: bool) -> None:
        self._is_of_group = is_of_group

    def _get_reward_funcs(self) -> list[Any]:
        return [None]

    def _is_group_func(self, function: Any) -> bool:
        return self._is_of_group

    async def score_group(self, states: list[State]) -> None:
        """The shortest of the right answers gets a point."""
        said = [state["completion"][-1]["content"] for state in states]
        right = [
            text for state, text in zip(states, said, strict=True) if text[0] == state["input"]["answer"]
        ]
        for state, text in zip(states, said, strict=True):
            state["reward"] = float(bool(right) and text == min(right, key=len))
            state["metrics"] = {"compared": len(states)}


class State(dict):
    """What is known of a rollout."""


class Environment:
    """Asks once more as long as the answer is "hm"; a right answer is worth a point."""

    def __init__(self, size: int, fault: str) -> None:
        self.rubric = Rubric(fault == "group")
        self._size, self._fault = size, fault
        self._is_scored = True

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        self._is_scored = score_rollouts

    def get_dataset(self) -> list[dict[str, Any]]:
        return [
            {"prompt": [{"role": "user", "content": f"{i} + 1?"}], "answer": str(i + 1), "example_id": i}
            for i in range(self._size)
        ]

    async def run_rollout(
        self, input: dict[str, Any], client: ClientConfig, model: str, sampling: dict, max_retries: int
    ) -> dict[str, Any]:
        if self._fault == "raises":
            raise RuntimeError("no database")
        if self._fault == "dies":
            os._exit(7)
        messages = list(input["prompt"])
        key = os.environ[client.api_key_var]
        async with openai.AsyncOpenAI(base_url=client.api_base_url, api_key=key, max_retries=0) as asked:
            while True:
                try:
                    reply = await asked.chat.completions.create(model=model, messages=messages)
                except openai.OpenAIError as error:
                    return {"error": repr(error), "reward": 0.0, "metrics": {}}
                said = reply.choices[0].message.content
                if said != "hm":
                    break
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        if not self._is_scored:
            completion = [{"role": "assistant", "content": said}]
            return {"completion": completion, "stop_condition": "done", "is_truncated": False, "reward": 0.0}
        reward = float("nan") if self._fault == "nan" else float(said == input["answer"])
        return {"reward": reward, "metrics": {"length": len(said)}, "stop_condition": "done"}


def load_environment(name: str, size: int = 8, fault: str = "") -> Environment:
    if name != "sums":
        raise ModuleNotFoundError(f"no environment {name}")
    return Environment(size, fault)


types = sys.modules[f"{__name__}.types"] = _types.ModuleType(f"{__name__}.types")
types.ClientConfig, types.State = ClientConfig, State
