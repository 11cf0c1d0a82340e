"""Supervised fine-tuning: trains a policy on conversations. It also makes the quickstart's initial policy."""

from __future__ import annotations

from pathlib import Path

from agentrl.adapters.catalog import agent_plugins
from agentrl.chat.chat import Chat
from agentrl.config.supervised import SFTConfig
from agentrl.fleet.user_files import check_files
from agentrl.offline.supervised import SupervisedJob, model_with_tokenizer, run_job
from agentrl.offline.supervised_data import read_conversations


def supervise(config: SFTConfig) -> Path:
    """Train on `data.train_files` and return the folder of the policy. Resumes a stopped run.

    Raises:
        UserError: a wrong key or a malformed conversation.
    """
    check_files({"model": config.model}, config.agent)
    plugins = agent_plugins(config.agent)
    model = model_with_tokenizer(config)
    chat = Chat.of(model)
    data = config.data
    train = read_conversations(data.train_files, data, chat, plugins)
    validation = read_conversations(data.val_files, data, chat, plugins) if data.val_files else None
    return run_job(SupervisedJob("sft", "conversation", config, model, train, validation))
