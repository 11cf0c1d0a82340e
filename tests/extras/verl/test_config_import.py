"""`agentrl config import`: every key of verl is accounted for, and what comes out loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.config.keys import iter_keys
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.verl.importing.docs import render
from agentrl.extras.verl.importing.source import WrittenConfig, read_source
from agentrl.extras.verl.importing.translate import Translation, translate
from agentrl.extras.verl.importing.values import NOT_TAKEN, VALUES
from agentrl.extras.verl.keys import KEPT, MEANINGLESS
from agentrl.extras.verl.renamed import RENAMED

KEYS = dict(line.split() for line in (Path(__file__).parent / "verl_keys.txt").read_text().splitlines())
"""Every key of ppo_trainer in verl 0.5.0, 0.6.1 and 0.7.1, and the kind of its default; link: it follows
another key.
"""
SAMPLES = {
    "bool": (True, False),
    "int": (2,),
    "float": (0.5,),
    "text": ("text",),
    "list": (["text"],),
    "map": ({"a": 1},),
    "null": (None, "text", 2),
    "link": (None,),
}

GSM8K_GRPO = """
algorithm.adv_estimator=grpo data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"] trainer.project_name=gsm8k
trainer.experiment_name=grpo trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""  # noqa: E501
PPO_CRITIC = """
algorithm.adv_estimator=gae data.train_files=[a.parquet,b.parquet] data.val_files=c.parquet data.train_batch_size=512
actor_rollout_ref.model.path=model actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 actor_rollout_ref.actor.optim.lr_warmup_steps=10
actor_rollout_ref.actor.ppo_epochs=2
actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 critic.model.path=critic critic.optim.lr=2e-5 critic.cliprange_value=0.2
critic.ppo_micro_batch_size_per_gpu=32 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.01
algorithm.kl_ctrl.target_kl=0.05 algorithm.gamma=0.99 algorithm.lam=0.95 trainer.nnodes=2 trainer.n_gpus_per_node=4
trainer.total_training_steps=100 trainer.critic_warmup=5 trainer.resume_mode=resume_path trainer.resume_from_path=runs/a/step_10
"""  # noqa: E501
DAPO = """
algorithm.adv_estimator=grpo data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=16
data.max_response_length=20480
actor_rollout_ref.model.path=Qwen/Qwen2.5-32B actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0 +algorithm.filter_groups.enable=True +algorithm.filter_groups.metric=acc
+algorithm.filter_groups.max_num_gen_batches=10 actor_rollout_ref.actor.loss_agg_mode=token-mean reward_model.reward_manager=dapo
+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 actor_rollout_ref.rollout.val_kwargs.do_sample=True
actor_rollout_ref.rollout.val_kwargs.temperature=1.0
actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.val_kwargs.n=32
actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 data.train_files=dapo.parquet data.val_files=aime.parquet trainer.n_gpus_per_node=8
"""  # noqa: E501
MULTI_TURN = """
algorithm.adv_estimator=grpo data.train_batch_size=256 actor_rollout_ref.model.path=model actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5
actor_rollout_ref.rollout.multi_turn.max_user_turns=3 actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2
actor_rollout_ref.rollout.multi_turn.max_tool_response_length=2048 actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml actor_rollout_ref.rollout.multi_turn.interaction_config_path=partners.yaml
actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 data.return_raw_chat=True custom_reward_function.path=reward.py
custom_reward_function.name=score +custom_reward_function.reward_kwargs.bonus=0.1 trainer.device=cpu trainer.n_gpus_per_node=2
~trainer.test_freq
"""  # noqa: E501
FULLY_ASYNC = """
algorithm.adv_estimator=reinforce_plus_plus data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.model.path=model
actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.optim.lr_warmup_steps=10
trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4
actor_rollout_ref.rollout.tensor_model_parallel_size=2 rollout.total_rollout_steps=51200 async_training.staleness_threshold=0.5
async_training.trigger_parameter_sync_step=4 async_training.require_batches=2 async_training.partial_rollout=True
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0
algorithm.rollout_correction.rollout_rs=seq_mean_k1 algorithm.rollout_correction.rollout_rs_threshold=0.5_4.0
"""  # noqa: E501
WIDTH = "actor_rollout_ref.rollout.tensor_model_parallel_size"
OTHER = {
    "gsm8k": [],
    "ppo": [],
    "dapo": ["algorithm.filter_groups.metric"],
    "multi_turn": [],
    "fully_async": ["algorithm.rollout_correction.rollout_rs"],
}
"""What a script's training would be without."""
SCRIPTS = {
    "gsm8k": GSM8K_GRPO,
    "ppo": PPO_CRITIC,
    "dapo": DAPO,
    "multi_turn": MULTI_TURN,
    "fully_async": FULLY_ASYNC,
}


def imported(script: str) -> Translation:
    return translate(read_source(None, script.split()))


def places(translation: Translation, key: str) -> int:
    """Count where a key is accounted for."""
    taken = any(key in setting.old for setting in translation.mapped)
    lists = (translation.dropped, translation.meaningless)
    return (
        taken
        + sum(any(finding.old == key for finding in findings) for findings in lists)
        + (key in translation.unknown)
    )


def test_every_key_of_verl_is_mapped_dropped_with_a_reason_or_without_meaning():
    for key, value in ((key, value) for key, kind in KEYS.items() for value in SAMPLES[kind]):
        try:
            translation = translate(WrittenConfig({key: value}))
        except ConfigError as error:
            assert key in str(error), error  # noqa: PT017 - a value that no key takes is refused by its name
            continue
        assert places(translation, key) >= 1, (key, value)
        assert key not in translation.unknown, (key, value)
        findings = (*translation.dropped, *translation.meaningless)
        assert all(finding.reason for finding in findings), (key, value)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_overrides_of_run_scripts_become_configs_that_load(name, tmp_path):
    out = tmp_path / "run.yaml"
    words = ["config", "import", *SCRIPTS[name].split(), "--out", str(out)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (done.exit_code, out.exists()) == ((1, False) if OTHER[name] else (0, True))
    assert ("trains something else" in done.stderr) is bool(OTHER[name])
    done = CliRunner().invoke(app, [*words, "--force"], catch_exceptions=False)
    assert done.exit_code == 0
    assert [finding.old for finding in imported(SCRIPTS[name]).decisive] == OTHER[name]
    assert imported(SCRIPTS[name]).obstacles == ()
    load_config(str(out))
    explained = CliRunner().invoke(app, ["config", "explain", str(out)], catch_exceptions=False)
    assert explained.exit_code == 0
    translation = imported(SCRIPTS[name])
    written = read_source(None, SCRIPTS[name].split()).written
    assert [key for key in written if places(translation, key) != 1 and key not in OTHER[name]] == []
    assert translation.unknown == ()


def config_of(script: str) -> Config:
    return Config.model_validate(imported(script).values)


def test_batches_are_prompts_and_minibatches_are_counted():
    config = config_of(GSM8K_GRPO)
    assert (
        config.buffer.groups_per_step,
        config.learner.minibatches_per_step,
        config.rollout.group_size,
    ) == (1024, 4, 5)
    assert config.learner.microbatch_tokens == 16 * (512 + 1024)
    assert (
        config.buffer.max_staleness,
        config.trainer.total_epochs,
        config.learner.gradient_checkpointing,
    ) == (0, 15, True)
    assert config.rollout.max_concurrent_trajectories == 1024 * 5
    assert (config.algorithm.kl.coefficient, config.algorithm.kl.estimator, config.algorithm.kl.place) == (
        0.001,
        "k3",
        "loss",
    )
    assert (config.data.train_files, config.data.overlong_prompts) == (("gsm8k/train.parquet",), "filter")
    assert (config.rollout.backend, config.rollout.num_servers, config.rollout.colocated) == (
        "sglang",
        8,
        True,
    )
    assert config.rollout.sglang.args == {"mem_fraction_static": 0.6}
    assert (config.learner.offload, config.learner.world_size, config.model.dtype) == (
        "optimizer",
        8,
        "bfloat16",
    )


def test_activations_are_offloaded_where_layers_are_recomputed():
    key = "actor_rollout_ref.model.enable_activation_offload"
    assert not config_of(GSM8K_GRPO).learner.activation_offload
    assert config_of(f"{GSM8K_GRPO} {key}=True").learner.activation_offload
    without = imported(f"{GSM8K_GRPO} {key}=True actor_rollout_ref.model.enable_gradient_checkpointing=False")
    assert not Config.model_validate(without.values).learner.activation_offload
    assert [found.old for found in without.dropped if found.old == key] == [key]


def test_the_critic_warmups_and_the_kl_of_the_reward():
    config = config_of(PPO_CRITIC)
    assert config.has_critic
    assert (config.critic.model.path, config.critic.optimizer.lr, config.critic.cliprange_value) == (
        "critic",
        2e-5,
        0.2,
    )
    assert config.learner.optimizer.warmup_updates == 10 * 4 * 2  # steps there, updates here
    assert (config.learner.sequence_parallel, config.learner.microbatch_tokens) == (2, 48000)
    assert (config.algorithm.kl.place, config.algorithm.kl.estimator, config.algorithm.kl.target) == (
        "reward",
        "k1",
        0.05,
    )
    assert (config.trainer.steps, config.trainer.resume_mode, config.critic.warmup_steps) == (
        100,
        "runs/a/step_10",
        5,
    )
    assert (config.placement.pools["main"].num_gpus, config.cluster.address) == (8, "auto")


def test_dapo():
    config = config_of(DAPO)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.dual_clip) == (
        0.2,
        0.28,
        10.0,
    )
    assert (config.buffer.drop_constant_groups, config.buffer.max_constant_batches) == (True, 10)
    assert config.reward.terms["length_penalty"].config == {"buffer_tokens": 4096}
    assert (config.eval.n, config.eval.temperature, config.eval.top_p) == (32, 1.0, 0.7)
    assert (config.learner.minibatches_per_step, config.learner.fsdp.shard_size) == (16, None)


def test_tools_turns_and_functions():
    config = config_of(MULTI_TURN)
    assert (config.agent.default, config.agent.max_turns, config.agent.max_user_turns) == ("tool_agent", 5, 3)
    assert (config.agent.max_tool_calls_per_turn, config.agent.max_tool_output_tokens) == (2, 512)
    assert (config.agent.verl_tool_config, config.agent.verl_interaction_config) == (
        "tools.yaml",
        "partners.yaml",
    )
    custom = config.reward.custom_function
    assert (custom.path, custom.name, custom.kwargs) == ("reward.py", "score", {"bonus": 0.1})
    assert config.rollout.sglang.args == {"attention_backend": "fa3"}
    assert (config.placement.pools, config.learner.world_size, config.trainer.test_freq) == ({}, 2, -1)


def test_asynchronous_training():
    config = config_of(FULLY_ASYNC)
    assert (config.buffer.groups_per_step, config.learner.minibatches_per_step, config.trainer.steps) == (
        256,
        8,
        200,
    )
    assert (config.buffer.max_staleness, config.learner.optimizer.warmup_updates) == (1, 10 * 2)
    assert (config.placement.pools["serving"].num_gpus, config.rollout.num_servers) == (4, 2)
    assert config.rollout.sglang.args == {"tp_size": 2}
    stage = config.algorithm.correction.reject["seq_mean_k1"]
    assert (stage.level, stage.lower, stage.upper) == (
        "sequence_mean",
        0.25,
        2.0,
    )  # verl's bounds are on the inverse ratio


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            "algorithm.aggregation",
            "constant",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            "algorithm.aggregation",
            "token_mean",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "algorithm.policy_loss", "gmpo"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.3", "algorithm.clip_high", 0.3),
        (
            "actor_rollout_ref.actor.clip_ratio=0.1 actor_rollout_ref.actor.clip_ratio_low=null",
            "algorithm.clip_low",
            0.1,
        ),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.mode", "decoupled"),
        (
            "+algorithm.rollout_is=True +algorithm.rollout_is_level=sequence",
            "algorithm.correction.weight",
            "sequence",
        ),
        ("+actor_rollout_ref.actor.tis_imp_ratio_cap=5", "algorithm.correction.cap", 5),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "learner.fsdp.shard_size", 2),
        ("actor_rollout_ref.model.lora_rank=8", "model.lora.alpha", 16),
        ("+algorithm.rollout_is=True", "algorithm.correction.weight", "token"),
        (
            "algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_is_batch_normalize=True",
            "algorithm.correction.self_normalize",
            True,
        ),
        (
            "algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_is_threshold=0.5_2.0",
            "algorithm.correction.floor",
            0.5,
        ),
        ("reward_model.reward_manager=naive", "buffer.max_staleness", 0),
        ("data.train_max_samples=-1", "data.max_train_rows", None),
        (
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
            "agent.max_tool_calls_per_turn",
            1,
        ),
        ("trainer.logger=[console,swanlab]", "trainer.logger", ["console"]),
        (
            "+data.apply_chat_template_kwargs.enable_thinking=False",
            "model.chat_template_kwargs",
            {"enable_thinking": False},
        ),
    ],
)
def test_single_keys(override, key, value):
    overrides = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *override.split()]
    found = {setting.key: setting.value for setting in translate(read_source(None, overrides)).mapped}
    assert found[key] == value


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "actor_rollout_ref.actor.clip_ratio=0.1",
            "without effect in verl, whose clip_ratio_low and clip_ratio_high are 0.2",
        ),
        (
            "algorithm.rollout_correction.rollout_is_threshold=3.0",
            "without rollout_is verl applies no weight",
        ),
        ("algorithm.adv_estimator=gdpo", "unknown estimator gdpo; choose algorithm.advantage among dr_grpo"),
        ("actor_rollout_ref.rollout.top_p=0.9", "0.9 would truncate the distribution"),
        (
            "actor_rollout_ref.actor.entropy_coeff=-1",
            "algorithm.entropy_coefficient must be at least 0, is -1",
        ),
        ("reward_model.micro_batch_size=16", "sequences in verl"),
        ("trainer.logger=[swanlab]", "none of swanlab is a tracker of agentrl"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=mine", "mine is your own class"),
        (
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=null",
            "null; the default of agent.max_turns applies",
        ),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
            "a share of the number of steps, which is unknown before the data is read",
        ),
    ],
)
def test_what_cannot_be_taken_over_says_why(override, reason):
    dropped = translate(read_source(None, ["actor_rollout_ref.rollout.n=4", override])).dropped
    assert next(
        finding.reason for finding in dropped if finding.old == override.partition("=")[0]
    ).startswith(reason)


def test_a_file_its_interpolations_and_overrides_after_it(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [ppo_trainer, mine, _self_]\n"
        "data: {max_response_length: 300, train_batch_size: 8}\nactor_rollout_ref:\n"
        "  rollout: {n: 4, response_length: '${data.max_response_length}'}\n"
        "  actor: {ppo_mini_batch_size: 4}\nalgorithm: {adv_estimator: grpo}\n"
        "trainer: {project_name: p, default_local_dir: 'runs/${trainer.project_name}', n_gpus_per_node: 1}\n"
    )
    shown = CliRunner().invoke(
        app,
        [
            "config",
            "import",
            str(file),
            "data.train_batch_size=16",
            "~trainer.nothing",
            "made.up=1",
            "--force",
        ],
    )
    config = yaml.safe_load(shown.stdout)
    assert config["buffer"]["groups_per_step"] == 16
    assert config["agent"]["max_response_tokens"] == 300
    assert config["trainer"]["run_dir"] == "runs/p"
    assert "made.up = 1" in shown.stderr
    assert "defaults: mine" in shown.stderr
    named = ["config", "import", "--config-path", str(tmp_path), "--config-name", "grpo"]
    assert yaml.safe_load(CliRunner().invoke(app, named).stdout)["buffer"]["groups_per_step"] == 8
    of_verl = [
        "config",
        "import",
        "--config-path",
        "config",
        "--config-name",
        "ppo_megatron_trainer.yaml",
        "data.train_batch_size=4",
    ]
    assert yaml.safe_load(CliRunner().invoke(app, of_verl).stdout)["buffer"]["groups_per_step"] == 4


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere.yaml"], "config file 'nowhere.yaml' does not exist"),
        (["data.train_batch_size=many"], "data.train_batch_size=many: must be a number"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=0"], "ppo_mini_batch_size=0: must be at least 1"),
        (
            [
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=much",
            ],
            "rollout_is_threshold=much: must be a number above 0",
        ),
        (
            [
                "+algorithm.rollout_correction.rollout_rs=token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold='1,2'",
            ],
            "one value for all of",
        ),
        (["data.train_batch_size=1,2"], "has several values"),
        (
            ["trainer.n_gpus_per_node=3", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
            "does not divide world_size=3",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, problem):
    result = CliRunner().invoke(app, ["config", "import", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert problem in str(result.exception)


@pytest.mark.parametrize(
    ("overrides", "command"),
    [
        (
            [
                "data.path=out.parquet",
                "data.response_key=answers",
                "data.prompt_key=prompt",
                "custom_reward_function.path=my.py",
            ],
            "agentrl score out.parquet --out out_scored.parquet --response-key answers --function "
            "my.py:compute_score",
        ),
        (
            [
                "data.path=out.parquet",
                "custom_reward_function.path=my.py",
                "+custom_reward_function.reward_kwargs.bonus=0.5",
            ],
            "agentrl score out.parquet --out out_scored.parquet --function my.py:compute_score --kwargs "
            "'{\"bonus\": 0.5}'",
        ),
        (
            [
                "data.path=in.parquet",
                "data.output_path=out.parquet",
                "data.n_samples=4",
                "model.path=m",
                "rollout.temperature=0.7",
            ],
            "agentrl generate --in in.parquet --out out.parquet --model m --n 4 --temperature 0.7",
        ),
        (
            [
                "data.train_files=[in.parquet]",
                "+data.output_path=out.parquet",
                "actor_rollout_ref.rollout.response_length=9",
            ],
            "agentrl generate --in in.parquet --out out.parquet --max-tokens 9",
        ),
    ],
)
def test_configs_of_generation_and_evaluation_are_commands_that_there_are(overrides, command):
    shown = CliRunner().invoke(app, ["config", "import", *overrides, "trainer.nnodes=1"])
    assert shown.stdout == f"{command}\n"
    assert shown.stderr == "no option: trainer.nnodes = 1\n"
    _, name, *words = command.split()
    offered = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
    assert all(word in offered for word in words if word.startswith("--"))


def test_what_kept_its_name_is_listed():
    known = {".".join(key) for key, _ in iter_keys(Config)}
    assert set(KEPT) <= known
    assert known & KEYS.keys() <= set(KEPT)


def test_the_page_of_keys_is_current():
    text = (Path(__file__).parents[3] / "agentrl/extras/verl/keys.md").read_text(encoding="utf-8")
    assert render() == text, "run `make docs`"
    assert [key for key in {*KEPT, *RENAMED, *MEANINGLESS} if f"\n| `{key}` |" not in text] == []


def test_no_translation_is_of_a_key_that_has_no_counterpart():
    assert sorted((VALUES.keys() | NOT_TAKEN.keys()) - RENAMED.keys() - set(KEPT)) == []
