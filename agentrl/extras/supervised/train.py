"""Supervised training: SFT of a policy on conversations, and of a reward model on preference pairs.

SFT also makes the quickstart's initial policy. A reward model is a sequence classifier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentrl.adapters.catalog import agent_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.template import read_json
from agentrl.cluster.user_files import check_files
from agentrl.config.model import ModelConfig
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.data.storage import mirrored_folder
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import RMConfig, SFTConfig
from agentrl.extras.supervised.data import Examples, read_conversations, read_pairs
from agentrl.extras.supervised.loop import SupervisedJob, model_with_tokenizer, run_folder, run_job
from agentrl.learner.score_head import ScoreHead

_PADDING = ("pad_token", "unk_token", "bos_token", "eos_token")


def supervise(config: SFTConfig) -> Path:
    """Train on `data.train_files` and return the local folder of the policy. Resumes a stopped run.

    Raises:
        UserError: a wrong key or a malformed conversation.
    """
    return _train("sft", "conversation", config, read_conversations)


def train_reward_model(config: RMConfig) -> Path:
    """Train on the pairs of `data.train_files` and return the local folder of the model. Resumes a stopped
    run.

    Raises:
        UserError: a wrong key, a malformed pair, or no token that can serve as padding.
    """
    return _train("rm", "pair", config, read_pairs)


def _train(name: str, noun: str, config: SFTConfig | RMConfig, read: Callable[..., Examples]) -> Path:
    with mirrored_folder(config.trainer.output, sends_after_error=False) as output:
        trainer = config.trainer.model_copy(update={"output": str(output)})
        return _train_locally(name, noun, config.model_copy(update={"trainer": trainer}), read)


def _train_locally(name: str, noun: str, config: SFTConfig | RMConfig, read: Callable[..., Examples]) -> Path:
    check_files({"model": config.model}, config.agent)
    plugins = agent_plugins(config.agent)
    model = model_with_tokenizer(config)
    chat, data = Chat.of(model), config.data
    if isinstance(config, SFTConfig):
        read = partial(read, images=run_folder(config.trainer).resolve() / IMAGES)
    train = read(data.train_files, data, chat, plugins)
    validation = read(data.val_files, data, chat, plugins) if data.val_files else None
    head = ScoreHead(find_padding(model, chat, train)) if isinstance(config, RMConfig) else None
    return run_job(SupervisedJob(name, noun, config, model, train, validation, head))


def find_padding(model: ModelConfig, chat: Chat, examples: Examples) -> int:
    """Return the id of the exported model's padding token: the first special token that ends no sequence.

    A sequence classifier of transformers reads its score at the last token that is not padding. If padding
    were the end-of-turn token, as in many tokenizers, every score would be read one token too early.

    Raises:
        ConfigError: all special tokens of the tokenizer end a conversation.
    """
    ends = {
        int(sample.token_ids[end - 1])
        for sample in examples.samples
        for end in (*sample.segment_starts[1:], sample.num_tokens)
    }
    folder = Path(model.tokenizer_path or model.path)
    named = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    for name in _PADDING:
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        ids = chat.encode(text) if text else []
        if len(ids) == 1 and ids[0] not in ends:
            return ids[0]
    raise ConfigError(
        f"the tokenizer of {folder} has no padding token other than the one that ends a turn; set pad_token "
        "in its config"
    )
