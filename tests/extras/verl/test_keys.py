"""What someone who brings verl's keys is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config.compose import load_config
from agentrl.config.keys import iter_keys, iter_sections
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import SFTConfig, load_sft_config
from agentrl.extras.verl.keys import MEANINGLESS, answer, targets
from agentrl.extras.verl.renamed import RENAMED, RENAMED_IN_SFT

KNOWN = {".".join(key) for key, _ in iter_keys(Config)}
SECTIONS = {".".join(key) for key, _ in iter_sections(Config)}
KNOWN_IN_SFT = {".".join(key) for key, _ in iter_keys(SFTConfig)}


def test_every_answer_is_a_key_of_ours() -> None:
    assert [
        key
        for key, answer in RENAMED.items()
        if not targets(answer, KNOWN) and not targets(answer, KNOWN_IN_SFT)
    ] == []


def test_every_answer_of_supervised_training_is_a_key_of_it() -> None:
    assert [key for key, answer in RENAMED_IN_SFT.items() if not targets(answer, KNOWN_IN_SFT)] == []


def test_no_key_that_kept_its_name_is_listed() -> None:
    assert {*RENAMED, *MEANINGLESS} & KNOWN == set()
    assert RENAMED.keys() & set(MEANINGLESS) == set()


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("data.train_batch_size", "buffer.groups_per_step"),
        ("data.max_response_length", "agent.max_response_tokens"),
        ("actor_rollout_ref.model.path", "model.path"),
        ("actor_rollout_ref.actor.optim.lr", "learner.optimizer.lr"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "learner.minibatches_per_step"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "agent.max_turns"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns", "agent.max_user_turns"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "agent.verl_tool_config"),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path", "agent.verl_function_tools"),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path", "agent.verl_interaction_config"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction.cap"),
        ("custom_reward_function.path", "reward.custom_function.path"),
        ("trainer.n_gpus_per_node", "placement.pools"),
        ("async_training.staleness_threshold", "buffer.max_staleness"),
    ],
)
def test_well_known_keys(key: str, ours: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("")
    with pytest.raises(
        ConfigError, match=rf"^{key} is a key of verl; here it is {ours}\b.* \(override '{key}=1'\)$"
    ):
        load_config(str(path), [f"{key}=1"])


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("actor_rollout_ref.actor.ppo_epochs", "learner.epochs_per_step"),
        ("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl.coefficient"),
        ("actor_rollout_ref.actor.clip_ratio_high", "algorithm.clip_high"),
        ("actor_rollout_ref.actor.loss_agg_mode", "algorithm.aggregation"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "learner.sequence_parallel"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", "learner.fsdp.shard_size"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "learner.offload"),
        ("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
        ("actor_rollout_ref.model.lora_alpha", "model.lora.alpha"),
        ("actor_rollout_ref.model.target_modules", "model.lora.target_modules"),
        ("actor_rollout_ref.model.external_lib", "model.external_lib"),
    ],
)
def test_keys_of_the_learner(key: str, ours: str) -> None:
    assert re.match(rf"here it is {ours}\b", str(answer(key, KNOWN)))


def test_the_longest_beginning_says_why_there_is_none() -> None:
    deep = answer("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", KNOWN)
    assert deep == f"has no meaning here: {MEANINGLESS['actor_rollout_ref.actor.megatron']}"
    assert (
        answer("actor_rollout_ref.actor.something", KNOWN)
        == f"has no meaning here: {MEANINGLESS['actor_rollout_ref.actor']}"
    )
    assert answer("actor_rollout_ref_.rollout.n", KNOWN) is None
    assert answer("trainer.stepps", KNOWN) is None


def test_no_key_of_ours_is_hidden_by_an_answer() -> None:
    """A misspelt key of a section must reach the search for the nearest one."""
    assert not [s for s in SECTIONS if s in MEANINGLESS]


def test_a_misspelt_key_of_the_critic_is_no_key_of_verl(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("critic: {warmup_step: 3, forward_micro_batch_size: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    misspelt, of_verl = str(caught.value).splitlines()
    assert misspelt.startswith("unknown key critic.warmup_step; did you mean critic.warmup_steps?")
    assert of_verl.startswith(
        "critic.forward_micro_batch_size is a key of verl; has no meaning here: the critic follows the "
        "learner's"
    )


def test_a_whole_file_of_verl_is_answered_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_batch_size: 256}\n"
        "actor_rollout_ref:\n"
        "  rollout:\n"
        "    n: 8\n"
        "    multi_turn: {enable: true}\n"
        "  actor: {optim: {lr: 1.0e-6}}\n"
        "trainer: {total_epochs: 3}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "data.train_batch_size",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.multi_turn.enable",
        "actor_rollout_ref.actor.optim.lr",
    ]
    assert [line.rpartition(":")[2] for line in lines] == ["1)", "4)", "5)", "6)"]


def test_supervised_training_has_its_own_answers(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("data: {train_batch_size: 64}\nmodel: {partial_pretrain: policy}\n")
    with pytest.raises(ConfigError) as caught:
        load_sft_config(str(path))
    assert "trainer.batch_size" in str(caught.value)
    assert "model.path" in str(caught.value)
