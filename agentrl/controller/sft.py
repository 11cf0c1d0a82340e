"""Supervised fine-tuning on the same learner: conversations in, a policy out. The quickstart's warm start is made by it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.schema import Config, ModelConfig, SFTConfig, SFTDataConfig
from agentrl.controller.cluster import interruptible, ray_session
from agentrl.data.files import open_rows
from agentrl.errors import ConfigError, DataError
from agentrl.learner.actor import LearnerGroup
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack
from agentrl.plugins import Plugins
from agentrl.tracking.job import JobProgress
from agentrl.types import Message, ToolCall


def supervise(config: SFTConfig) -> Path:
    """Train on `data.train_files` and return the folder of the policy.

    Raises:
        UserError: a wrong key, a malformed conversation.
    """
    plugins = open_plugins(config.agent)
    output = Path(config.trainer.output)
    model = _model_with_tokenizer(config, output)
    chat = Chat.of(model)
    samples = read_conversations(config.data, chat, plugins)
    with interruptible(), ray_session(config.cluster):
        learner = LearnerGroup.start(
            model,
            config.learner,
            Config().algorithm,
            seed=config.trainer.seed,
            temperature=1.0,
            total_updates=config.trainer.steps,
            from_scratch=config.from_scratch if config.from_scratch.architecture != "none" else None,
            gpus_per_learner=config.cluster.gpus_per_learner,
        )
        try:
            if config.trainer.untrained_output:
                learner.export(config.trainer.untrained_output)
            _train(learner, config, samples)
            learner.export(str(output))
        finally:
            learner.stop()
    return output


def _train(learner: LearnerGroup, config: SFTConfig, samples: Sequence[Sample]) -> None:
    batches = _batches(len(samples), config.trainer.batch_size, seed=config.trainer.seed)
    output = Path(config.trainer.output)
    with JobProgress("sft", total=config.trainer.steps, file=output.with_name(f"{output.name}_metrics.jsonl")) as progress:
        for step in range(1, config.trainer.steps + 1):
            batch = [samples[i] for i in next(batches)]
            shards = pack(batch, max_tokens=config.learner.microbatch_tokens, world_size=config.learner.world_size)
            metrics = learner.supervised_update(shards)
            progress.step(step, {name: metrics[name] for name in ("loss", "entropy", "grad_norm", "lr") if name in metrics})


def _batches(num_samples: int, batch_size: int, *, seed: int) -> Iterator[np.ndarray]:
    """Yield index batches without end; every epoch is a new permutation, and no sample is left out of one."""
    rng = np.random.default_rng(seed)
    queue = np.empty(0, np.int64)
    while True:
        while len(queue) < batch_size:
            queue = np.concatenate([queue, rng.permutation(num_samples)])
        batch, queue = queue[:batch_size], queue[batch_size:]
        yield batch


# ------------------------------------------------------------------------------------------------------------ data


def read_conversations(config: SFTDataConfig, chat: Chat, plugins: Plugins) -> list[Sample]:
    """Render every conversation; its assistant turns (calls included) are what is learned.

    Raises:
        DataError: a malformed row, or none that fits `data.max_tokens`.
    """
    samples: list[Sample] = []
    num_long = 0
    for path in config.train_files:
        file = open_rows(path)
        for index, row in enumerate(file.rows(len(file))):
            messages = _messages(row.get(config.messages_key), f"{path}, row {index}, {config.messages_key}")
            schemas = [plugins.tools.get(name)().schema() for name in row.get(config.tools_key) or ()]
            built = chat.render_training(messages, schemas)
            if len(built.token_ids) > config.max_tokens:
                num_long += 1
                continue
            samples.append(Sample.supervised(len(samples), built.token_ids, built.mask, built.segment_starts))
    if not samples:
        what = f"all {num_long} conversations exceed data.max_tokens={config.max_tokens}" if num_long else "data.train_files has none"
        raise DataError(f"no conversation to learn from: {what}")
    return samples


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {value!r} is not a list of messages")
    return [_message(item, f"{where}[{i}]") for i, item in enumerate(value)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict) or item.get("role") not in ("system", "user", "assistant", "tool"):
        raise DataError(f"{where}: {item!r} is not a message; it needs a role out of system, user, assistant, tool")
    calls = tuple(_call(call, number, where) for number, call in enumerate(item.get("tool_calls") or ()))
    return Message(item["role"], item.get("content") or "", calls, item.get("tool_call_id"), item.get("name"))


def _call(call: Any, number: int, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}.tool_calls[{number}]: {call!r} is not a call; it needs function {{name, arguments}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(call.get("id") or f"call_{number}", function["name"], arguments)


# ----------------------------------------------------------------------------------------------------------- model


def _model_with_tokenizer(config: SFTConfig, output: Path) -> ModelConfig:
    """Return the model config with a tokenizer: its own, or for a model from scratch the byte-level one of this project."""
    if config.from_scratch.architecture == "none":
        if not (Path(config.model.path) / "config.json").is_file():
            raise ConfigError(f"model.path={config.model.path!r} is not the folder of a model; or set from_scratch.architecture=qwen2")
        return config.model
    if config.model.tokenizer_path:
        return config.model
    write_tiny_tokenizer(output)
    return config.model.model_copy(update={"tokenizer_path": str(output)})
