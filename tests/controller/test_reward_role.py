"""The reward model as a role: scores against plain transformers, the conversations it reads, and what is
refused.
"""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    Qwen2Config,
)

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import TEMPLATE_FILE, write_tiny_tokenizer
from agentrl.cluster.workers import LocalWorker
from agentrl.config.agent import AgentConfig
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.schema import Config
from agentrl.controller.batch_rewards import BatchRewards
from agentrl.controller.conversations import Conversations
from agentrl.controller.reward_role import RewardRole, resolve_reward_model
from agentrl.errors import ConfigError, LearnerError, RewardError
from agentrl.learner.reward_model import RewardModel, outline_classifier
from agentrl.plugins import Attempted, load_plugins
from agentrl.types import Message, Outcome, Task, ToolCall
from parts.trajectories import make_trajectory

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}
KINDS = {
    "qwen2": (Qwen2Config, AutoModelForSequenceClassification),
    "llama": (LlamaConfig, AutoModelForSequenceClassification),
    "per_token": (Qwen2Config, AutoModelForTokenClassification),
}
PLUGINS = open_plugins(AgentConfig())
AGENT = AgentConfig(tools=("calculator",))
CALL = ToolCall("call1", "calculator", {"expression": "1+1"})


def write_model(folder, kind="qwen2", **changes):
    write_tiny_tokenizer(folder)
    torch.manual_seed(0)
    config, auto = KINDS[kind]
    padding = AutoTokenizer.from_pretrained(folder).pad_token_id
    fields = (
        SIZES
        | {"vocab_size": Chat.load(str(folder)).vocab_size, "num_labels": 1, "pad_token_id": padding}
        | changes
    )
    auto.from_config(config(**fields)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def section(folder, **changes):
    return RewardModelConfig.model_validate({"model": {"path": str(folder)}, **changes})


def attempt(*messages, agent="single_turn_agent", outcome=Outcome.COMPLETED):
    task = Task("t:0", "s", messages[:1], agent)
    return Attempted(task, tuple(messages), outcome, 1, 2, 2, 10)


def talk(*texts):
    return attempt(*(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)))


SOME = [
    talk("Hi", "Hello!"),
    talk("Compute 2.", "4", "Again, with words: how much?", "It is four, says the calculator."),
    talk("?", ""),
    attempt(
        Message("user", "1+1?"),
        Message("assistant", "", (CALL,)),
        Message("tool", "2", tool_call_id="call1"),
        Message("assistant", "2"),
    ),
    talk("x" * 40, "y" * 30),
]


@contextmanager
def role(folder, *, agent=AGENT, **changes):
    config = section(folder, **changes)
    ranks = LocalWorker(RewardModel(config, rank=0, address="127.0.0.1", port=0), close=RewardModel.close)
    try:
        yield RewardRole(ranks, Conversations(config, agent, PLUGINS), config)
    finally:
        ranks.stop()


def values(results):
    return [result.value for result in results]


@torch.no_grad()
def plain_scores(folder, kind, texts, *, is_padded):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = KINDS[kind][1].from_pretrained(folder, attn_implementation="eager").eval()

    def last_logits(batch):
        tokens = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        logits = model(**tokens).logits
        if kind != "per_token":
            return logits[:, 0]
        return logits[torch.arange(len(batch)), tokens["attention_mask"].sum(1) - 1, 0]

    return last_logits(texts).tolist() if is_padded else [last_logits([text]).item() for text in texts]


def as_template(tokenizer, one):
    messages = [{"role": m.role, "content": m.content} for m in one.messages]
    for message, shown in zip(one.messages, messages, strict=True):
        if message.tool_calls:
            shown["tool_calls"] = [
                {"function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
            ]
    return tokenizer.apply_chat_template(messages, tokenize=False)


# ----------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers_alone_and_padded(folders, kind):
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    texts = [as_template(tokenizer, one) for one in SOME]
    with role(folders[kind], render="template") as judge:
        ours = values(judge.score(SOME))
    for is_padded in (False, True):
        np.testing.assert_allclose(
            ours, plain_scores(folders[kind], kind, texts, is_padded=is_padded), atol=1e-5
        )
    assert np.std(ours) > 0.01
    with role(folders[kind], render="turns") as judge:
        turns = values(judge.score(SOME))
    up_to_the_end = [text.rstrip("\n") for text in texts]
    np.testing.assert_allclose(
        turns, plain_scores(folders[kind], kind, up_to_the_end, is_padded=False), atol=1e-5
    )
    assert np.abs(np.array(turns) - ours).max() > 1e-3


def test_neither_packing_nor_order_matters(folders):
    with role(folders["qwen2"]) as judge:
        together = values(judge.score(SOME))
    with role(folders["qwen2"], microbatch_tokens=1) as judge:
        np.testing.assert_allclose(values(judge.score(SOME)), together, atol=1e-6)
    with role(folders["qwen2"], microbatch_tokens=90) as judge:
        np.testing.assert_allclose(values(judge.score(SOME[::-1]))[::-1], together, atol=1e-6)
        assert values(judge.score(SOME[:1])) == pytest.approx(together[:1], abs=1e-6)
        assert judge.score([]) == []


def test_half_precision_scores_come_near(folders):
    with role(folders["qwen2"]) as judge:
        exact = values(judge.score(SOME))
    with role(folders["qwen2"], model={"path": str(folders["qwen2"]), "dtype": "bfloat16"}) as judge:
        np.testing.assert_allclose(values(judge.score(SOME)), exact, atol=0.1)


# ---------------------------------------------------------------------------------------------- conversations


def texts_of(folder, *attempts, agent=AGENT, **changes):
    conversations, chat = Conversations(section(folder, **changes), agent, PLUGINS), Chat.load(str(folder))
    rendered = [conversations.render(one) for one in attempts]
    return [None if one is None else chat.decode(one.token_ids.tolist()) for one in rendered]


def test_a_conversation_ends_with_what_the_assistant_said_last(folders):
    asked = attempt(*SOME[3].messages[:2])
    [answered, unanswered, told_again, bare] = texts_of(
        folders["qwen2"],
        asked,
        attempt(*SOME[3].messages[:3]),
        attempt(*asked.messages, Message("user", "Well?")),
        attempt(Message("user", "?")),
    )
    assert answered == unanswered == told_again
    assert answered.endswith(
        'assistant\n<tool_call>{"name": "calculator", "arguments": {"expression": '
        '"1+1"}}</tool_call><|im_end|>'
    )
    assert bare is None


def test_a_truncated_answer_is_closed_and_control_tokens_in_content_stay_text(folders):
    cut = attempt(
        Message("user", "Say <|im_end|> twice."), Message("assistant", "<|im_en"), outcome=Outcome.TRUNCATED
    )
    conversations, chat = (
        Conversations(section(folders["qwen2"]), AGENT, PLUGINS),
        Chat.load(str(folders["qwen2"])),
    )
    ids = conversations.render(cut).token_ids.tolist()
    assert chat.decode(ids).endswith("assistant\n<|im_en<|im_end|>")
    assert ids.count(chat.encode("<|im_end|>")[0]) == 2


def test_tools_are_shown_where_the_agent_shows_them(folders):
    single, offered = texts_of(
        folders["qwen2"],
        talk("1+1?", "2"),
        replace(SOME[3], task=replace(SOME[3].task, agent_name="tool_agent")),
    )
    assert "Tools:" not in single
    assert offered.startswith("<|im_start|>system\nTools:\ncalculator(")


@pytest.mark.parametrize("render", ["turns", "template"])
def test_what_is_too_long_loses_its_beginning_or_gets_no_score(folders, render):
    [whole, short] = texts_of(folders["qwen2"], SOME[4], SOME[0], render=render)
    [cut, as_it_was] = texts_of(folders["qwen2"], SOME[4], SOME[0], render=render, max_tokens=50)
    assert whole.endswith(cut)
    assert len(cut) < len(whole)
    assert as_it_was == short
    with role(folders["qwen2"], max_tokens=50, render=render) as judge:
        assert [dict(result.metrics) for result in judge.score([SOME[4], SOME[0]])] == [
            {"truncated": 1.0},
            {"truncated": 0.0},
        ]
    with role(folders["qwen2"], max_tokens=50, render=render, overlong="skip") as judge:
        skipped, scored = judge.score([SOME[4], SOME[0]])
        assert judge.score([SOME[4]]) == [skipped] == [None]
        assert scored is not None


def test_the_model_positions_are_the_default_bound(folders):
    [cut] = texts_of(folders["qwen2"], talk("?", "!" * 600))
    assert len(cut) < 600
    with pytest.raises(ConfigError, match=r"reward_model.max_tokens=513 exceeds the 512 positions"):
        Conversations(section(folders["qwen2"], max_tokens=513), AGENT, PLUGINS)


# ------------------------------------------------------------------------------------------------------ terms


def rewards_of(folder, **terms):
    config = Config.model_validate(
        {"reward": {"terms": terms}, "reward_model": {"model": {"path": str(folder)}}}
    )
    return BatchRewards(
        config.reward,
        load_plugins(),
        max_response_tokens=config.agent.max_response_tokens,
        model=config.model,
    )


def test_a_term_asks_the_model_that_the_run_connects(folders):
    rewards = rewards_of(
        folders["qwen2"],
        helpful={"reward": "reward_model", "weight": 0.5},
        polite={"reward": "reward_model", "weight": 0},
    )
    assert rewards.is_any
    with pytest.raises(RewardError, match=r"no reward model is running"):
        rewards._table._terms[0].reward.score(SOME)
    with role(folders["qwen2"]) as judge:
        rewards.connect(judge.score)
        expected = values(judge.score(SOME))
        assert [values(term.reward.score(SOME)) for term in rewards._table._terms] == [expected, expected]
    assert {term.timeout_s for term in rewards._table._terms} == {float("inf")}


def test_a_lost_rank_ends_the_run_and_is_no_verdict_on_a_batch(folders):
    """The ranks are of no use after that: neither another batch nor a validation of zeros would say so."""
    reward = RewardConfig.model_validate({"sources": {"s": "reward_model"}})
    rewards = BatchRewards(reward, load_plugins(), max_response_tokens=1024, model=ModelConfig())

    def ask(attempts):
        raise LearnerError("reward model rank 0 was lost in 'score'")

    rewards.connect(ask)
    task, trajectory = SOME[0].task, make_trajectory([-1, 0], messages=SOME[0].messages)
    for score in (rewards.score, rewards.score_validation):
        with pytest.raises(LearnerError, match=r"^reward model rank 0 was lost"):
            score([task], [trajectory])


# ---------------------------------------------------------------------------------------------------- refused


def refused(match, **config):
    with pytest.raises(ValidationError, match=match):
        Config.model_validate(config)


def test_keys_that_belong_together(folders):
    term = {"reward": {"terms": {"helpful": {"reward": "reward_model"}}}}
    model = {"reward_model": {"model": {"path": "somewhere"}}}
    assert Config.model_validate(term | model).reward_model.is_used
    assert Config.model_validate(
        {"reward": {"sources": {"chat": "reward_model"}}} | model
    ).reward_model.is_used
    refused(r"reward.terms.helpful uses the reward model, but reward_model.model.path is empty", **term)
    refused(r"reward.terms.reward_model uses the reward model", reward={"terms": {"reward_model": {}}})
    refused(r"reward.sources.chat uses the reward model", reward={"sources": {"chat": "reward_model"}})
    refused(r"'somewhere' is not used by any reward; add a term", **model)
    late = {"reward": {"terms": {"helpful": {"reward": "reward_model", "timeout_s": 3}}}}
    refused(r"reward.terms.helpful.timeout_s: the reward model has its own deadlines", **late, **model)
    uneven = {"reward_model": {"model": {"path": "x"}, "world_size": 2, "fsdp": {"shard_size": 3}}}
    refused(r"fsdp.shard_size=3 does not divide world_size=2", **term, **uneven)
    refused(
        r"lora.rank=4: the reward model is not trained in this run",
        **term,
        reward_model={"model": {"path": "x", "lora": {"rank": 4}}},
    )
    with pytest.raises(ConfigError, match=r"reward 'reward_model': scale: "):
        rewards_of("x", helpful={"reward": "reward_model", "config": {"scale": 2}})


def test_a_model_that_cannot_score_is_refused(folders, tmp_path):
    causal = write_model(tmp_path / "causal")
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(causal)
    two = write_model(tmp_path / "two", num_labels=2)
    bert = write_model(tmp_path / "bert")
    AutoModelForSequenceClassification.from_config(
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_labels=1)
    ).save_pretrained(bert)
    headless = write_model(tmp_path / "headless")
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, vocab_size=4)).model.save_pretrained(headless)
    described = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(
        json.dumps(described | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1})
    )
    for folder, words in (
        (causal, "is not a reward model: its config names Qwen2ForCausalLM; train one with `agentrl rm`"),
        (two, "has 2 labels; a reward model has one"),
        (bert, "BertForSequenceClassification has no scalar head 'score'"),
        (headless, "lacks 1 weight ('score.weight')"),
    ):
        with pytest.raises(ConfigError) as caught:
            outline_classifier(section(folder).model, "eager")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_folder_without_model_or_template_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"^reward_model.model.path='nowhere/at/all' cannot be loaded"):
        resolve_reward_model(section("nowhere/at/all"))
    assert resolve_reward_model(RewardModelConfig()) == RewardModelConfig()
    with pytest.raises(ConfigError, match=r"has 2 labels"):
        resolve_reward_model(section(write_model(tmp_path / "two", num_labels=2)))
    bare = tmp_path / "bare"
    shutil.copytree(folders["qwen2"], bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"^reward_model: .*chat template"):
        Conversations(section(bare), AGENT, PLUGINS)
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{%- if messages | selectattr('role', 'equalto', 'tool') | list %}{{ raise_exception('no tools') "
        "}}{% endif -%}"
    )
    strict.write_text(strict.read_text() + TEMPLATE_FILE.read_text())
    config = section(folders["qwen2"], model={"path": str(folders["qwen2"]), "chat_template": str(strict)})
    assert Conversations(config, AgentConfig(), PLUGINS).render(SOME[0]) is not None
    with pytest.raises(
        ConfigError,
        match=r"^reward_model: the chat template fails on the roles \[user assistant tool\w*.*no tools",
    ):
        Conversations(config, AGENT, PLUGINS)
