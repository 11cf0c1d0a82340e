"""Explain a config of `agentrl sft` or `agentrl rm`: batch, run, and warnings about likely mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from agentrl.config.storage_urls import shown_path
from agentrl.extras.plan.input_warnings import input_warnings
from agentrl.extras.supervised.config import RMConfig, SFTConfig

LABEL_WIDTH = 26

Lines = list[tuple[str, str]]


def explain_supervised(config: SFTConfig | RMConfig) -> str:
    """Return the arithmetic of a supervised run as text."""
    parts = [("One update", _update_lines(config)), ("Run", _run_lines(config))]
    text = "\n\n".join(
        f"{title}\n" + "\n".join(f"  {label:<{LABEL_WIDTH}}{value}" for label, value in lines)
        for title, lines in parts
    )
    model = None if config.from_scratch.architecture != "none" else config.model.path
    warnings = [
        *input_warnings(model, config.data.train_files, is_prepared=bool(config.trainer.prepared_by)),
        *find_warnings(config),
    ]
    return text + (
        "\n\nWarnings\n" + "\n".join(f"  - {warning}" for warning in warnings)
        if warnings
        else "\n\nNo warnings"
    )


def longest_tokens(config: SFTConfig | RMConfig) -> int:
    """Return the maximum number of tokens of one example: a conversation, or both conversations of a pair."""
    return config.data.max_tokens * (2 if isinstance(config, RMConfig) else 1)


def find_warnings(config: SFTConfig | RMConfig) -> Iterator[str]:
    """Yield one sentence for each combination that works but is probably a mistake."""
    learner, trainer, longest = config.learner, config.trainer, longest_tokens(config)
    if learner.microbatch_tokens < longest:
        what = "a pair, which is not split," if isinstance(config, RMConfig) else "a conversation"
        yield (
            f"learner.microbatch_tokens={learner.microbatch_tokens} is smaller than {what} of "
            f"{longest} tokens: it forms a microbatch by itself and must fit into memory"
        )
    if learner.dp_size > trainer.batch_size:
        sizes = f"learner.world_size={learner.world_size} exceeds trainer.batch_size={trainer.batch_size}"
        yield f"{sizes}: some ranks have nothing to learn from"
    if trainer.test_freq > 0 and not config.data.val_files:
        yield f"trainer.test_freq={trainer.test_freq} without data.val_files: there is nothing to measure"
    if trainer.steps is not None and learner.optimizer.warmup_updates >= trainer.steps:
        yield (
            f"learner.optimizer.warmup_updates={learner.optimizer.warmup_updates} is not below "
            f"trainer.steps={trainer.steps}: the learning rate only rises"
        )
    if trainer.steps is not None and trainer.total_epochs > 1:
        yield (
            f"trainer.total_epochs={trainer.total_epochs} has no effect beside trainer.steps={trainer.steps}"
        )
    if trainer.save_freq == -1 and trainer.steps is not None and trainer.steps >= 1000:
        yield f"trainer.save_freq=-1: a crash in {trainer.steps} updates loses everything"


def _update_lines(config: SFTConfig | RMConfig) -> Lines:
    learner, size, longest = config.learner, config.trainer.batch_size, longest_tokens(config)
    per_rank = math.ceil(size / learner.dp_size)
    packs = math.ceil(per_rank / max(1, learner.microbatch_tokens // longest))
    is_pairs = isinstance(config, RMConfig)
    loss = "-log sigmoid(chosen - rejected), a mean over the pairs of the update"
    return [
        ("pairs" if is_pairs else "conversations", f"{size:,}"),
        (
            "tokens",
            f"at most {size * longest:,} = {size:,} x {longest:,}{' (both of a pair)' if is_pairs else ''}",
        ),
        ("too long", f"more than {config.data.max_tokens:,} tokens: {_OVERLONG[config.data.overlong]}"),
        (
            "microbatches",
            f"at most {packs:,} on each of {_count(learner.dp_size, 'rank')}, of "
            f"{learner.microbatch_tokens:,} tokens",
        ),
        (
            "loss",
            loss
            if is_pairs
            else f"cross-entropy of {_learned(config)}, a mean over the tokens of the update",
        ),
    ]


_OVERLONG = {"drop": "left out, counted", "truncate": "cut, counted"}


def _learned(config: SFTConfig | RMConfig) -> str:
    assert isinstance(config, SFTConfig)
    return "every assistant turn" if config.data.prompt_key is None else "the response"


def _run_lines(config: SFTConfig | RMConfig) -> Lines:
    trainer, optimizer = config.trainer, config.learner.optimizer
    epochs = f"{_count(trainer.total_epochs, 'epoch')} of the training rows (trainer.total_epochs)"
    steps = (
        f"{trainer.steps:,} (trainer.steps), {trainer.steps * trainer.batch_size:,} examples"
        if trainer.steps is not None
        else epochs
    )
    warmup = (
        f" after {_count(optimizer.warmup_updates, 'update')} of warm-up" if optimizer.warmup_updates else ""
    )
    when = (
        f"every {_count(trainer.test_freq, 'update')} and at the end"
        if trainer.test_freq > 0
        else "at the end"
    )
    saved = f"every {_count(trainer.save_freq, 'update')} and at the end, the last {trainer.keep_last} kept"
    exported = "the last weights" if trainer.export == "last" else "the weights of the lowest validation loss"
    return [
        ("updates", steps),
        ("learning rate", f"{optimizer.lr:g}, {optimizer.schedule}{warmup}"),
        ("validation", when if config.data.val_files else "none: no data.val_files"),
        ("checkpoints", saved if trainer.save_freq > 0 else "never"),
        ("model", f"{exported}, in {shown_path(trainer.output)}"),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
