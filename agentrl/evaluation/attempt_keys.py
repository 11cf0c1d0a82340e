"""Keys of attempts: an attempt's key covers everything that could change its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agentrl
from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.errors import ConfigError
from agentrl.evaluation.templates import Template
from agentrl.types import JsonObject, Task

_WHOLE_BYTES = 2**20
"""Files up to this size are hashed whole. Larger files, which are weights, are hashed by size and pieces."""
_PIECES = 64
_PIECE_BYTES = 4096
_NOT_OF_ATTEMPTS = frozenset({"n", "timeout_s", "templates", "rewards", "tools"})
"""Keys of `eval` that do not belong to an attempt: the number of attempts,
and keys that the code has already applied to tasks, agent and rewards.
"""
_OWN_FILES = frozenset({".py", ".jinja", ".yaml"})
_DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "*.safetensors")


def fingerprint(folder: str | Path) -> str:
    """Return a hash of a model folder: of small files whole, of weights by size and 64 pieces of 4 KiB.

    An optimizer update changes all pieces. A file with only a few bytes edited between the pieces keeps its
    fingerprint.

    Raises:
        ConfigError: the folder has no such files.
    """
    digest = hashlib.sha256()
    files = sorted({file for pattern in _DESCRIPTIONS for file in Path(folder).glob(pattern)})
    if not files:
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a model: it has none of {', '.join(_DESCRIPTIONS)}"
        )
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as opened:
            if size <= _WHOLE_BYTES:
                digest.update(opened.read())
                continue
            for piece in range(_PIECES):
                opened.seek(piece * (size - _PIECE_BYTES) // (_PIECES - 1))
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """The sections of a config that affect an attempt. `weights` identifies the model's weights.

    `reward` is None if attempts are not scored. opponents: by name, what affects what they say.
    """

    weights: str
    model: ModelConfig
    data: DataConfig
    agent: AgentConfig
    sampling: EvalConfig
    reward: RewardConfig | None
    opponents: Mapping[str, JsonObject] = field(default_factory=dict)


def producer_of(settings: AttemptSettings, template: Template | None) -> dict[str, Any]:
    """Return everything that affects an attempt, as JSON values.

    These are the model, sampling, the agent with its tools, the template, the rewards, and the files in which
    they are defined.
    """
    sampling = {
        name: value
        for name, value in settings.sampling.model_dump(mode="json").items()
        if name not in _NOT_OF_ATTEMPTS
    }
    reward = None if settings.reward is None else settings.reward.model_dump(mode="json")
    # Not the addresses of opponents, but their weights: they may move, and a server may get others.
    agent = settings.agent.model_dump(mode="json") | {"opponents": dict(settings.opponents)}
    parts = {"agent": agent, "reward": reward}
    tokenizer = {
        name: getattr(settings.model, name)
        for name in ("chat_template", "tool_format", "template_edits", "dtype")
    }
    # Only if there are any: evaluations without them keep the attempts that they have.
    if settings.model.chat_template_kwargs:
        tokenizer["chat_template_kwargs"] = settings.model.chat_template_kwargs
    return {
        "agentrl": agentrl.__version__,
        "model": settings.weights,
        "tokenizer": tokenizer,
        "prompt": {"max_tokens": settings.data.max_prompt_tokens, "overlong": settings.data.overlong_prompts},
        "sampling": sampling,
        "template": None if template is None else dataclasses.asdict(template),
        **parts,
        "files": {
            path: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
            for path in sorted(set(_files_of((parts, tokenizer))))
        },
    }


def attempt_key(producer: JsonObject) -> Callable[[str, int, int], str]:
    """Return the function that maps (problem hash, occurrence, member) to the key of a producer's attempt.

    The occurrence, counted from 0, distinguishes equal rows of one data set.
    """
    own = json_hash(producer)
    return lambda problem, occurrence, member: json_hash([own, problem, occurrence, member])


def problem_hash(task: Task) -> str:
    """Return a hash of a row's content, independent of its position."""
    content = {name: value for name, value in dataclasses.asdict(task).items() if name != "task_id"}
    for message in content["messages"]:
        # Where they are stored is no part of it. Rows without images keep the hash that they had before.
        images = [image["sha256"] for image in message.pop("images")]
        message |= {"images": images} if images else {}
    return json_hash(content)


def json_hash(value: Any) -> str:
    """Return a hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _files_of(value: Any) -> Iterator[str]:
    """Yield the files that a config names: `file.py`, `file.py:function`, or a template."""
    if isinstance(value, Mapping):
        yield from (found for item in value.values() for found in _files_of(item))
    elif isinstance(value, (list, tuple)):
        yield from (found for item in value for found in _files_of(item))
    elif isinstance(value, str):
        path = value.rpartition(":")[0] if ".py:" in value else value
        if Path(path).suffix in _OWN_FILES and Path(path).is_file():
            yield path
