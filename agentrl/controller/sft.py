"""Supervised fine-tuning on the same learner: conversations in, a policy out. The quickstart's warm start is made by it."""

from __future__ import annotations

from pathlib import Path

from agentrl.adapters.catalog import agent_plugins
from agentrl.chat.chat import Chat
from agentrl.config.supervised import SFTConfig
from agentrl.controller.shipping import check_files
from agentrl.controller.supervised import SupervisedJob, model_with_tokenizer, run_job
from agentrl.controller.supervised_data import read_conversations


def supervise(config: SFTConfig) -> Path:
    """Train on `data.train_files` and return the folder of the policy; a run that was stopped goes on from its last checkpoint.

    Raises:
        UserError: a wrong key, a malformed conversation.
    """
    check_files(config)
    plugins = agent_plugins(config.agent)
    model = model_with_tokenizer(config)
    chat = Chat.of(model)
    data = config.data
    train = read_conversations(data.train_files, data, chat, plugins)
    validation = read_conversations(data.val_files, data, chat, plugins) if data.val_files else None
    return run_job(SupervisedJob("sft", "conversation", config, model, train, validation))
