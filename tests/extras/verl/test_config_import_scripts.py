"""`agentrl config import run.sh`: scripts are read as a shell would run them, and what would not run here is
said first.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import load_sft_config
from agentrl.extras.verl.importing.launches import source_of
from agentrl.extras.verl.importing.script import launch_of, read_launch
from agentrl.extras.verl.importing.shell import Shell
from agentrl.extras.verl.importing.source import WrittenConfig
from agentrl.extras.verl.importing.supervised_defaults import OF_COLUMNS
from agentrl.extras.verl.importing.translate import translate

PLAIN = """\
#!/usr/bin/env bash
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1   # of no matter here
train="$HOME/a/train.parquet"
math=$HOME/b/train.parquet
files="['$train', '$math']"
n=$((1024 * 2)); total=$((n + n / 2))
offload=False
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_trainer.yaml'\\
    algorithm.adv_estimator=grpo \\
    data.train_files="$files" \\
    data.train_batch_size=64 data.max_prompt_length=$n data.max_response_length=${total} \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=${MODEL_PATH:-org/small-1b} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
    trainer.logger=['console','wandb'] trainer.n_gpus_per_node=2 \\
    trainer.total_epochs=15 $@ 2>&1 | tee log.txt
"""
ARRAYS = """\
RAY=${RAY:-"http://localhost:1"}
: ${GROUPS_PER_STEP:=16}
DATA=(
    algorithm.adv_estimator=grpo
    # a comment between two items
    data.train_files="$HOME/a.parquet"     # and one behind an item
    data.train_batch_size=${GROUPS_PER_STEP}
    +data.extra='["x", "y"]'
)
MODEL=( "actor_rollout_ref.model.path=org/small-1b" )
MODEL+=(actor_rollout_ref.actor.ppo_mini_batch_size=8)
if [ "${BACKEND:-fsdp}" = "fsdp" ]; then
    MODEL+=(actor_rollout_ref.actor.fsdp_config.param_offload=True)
elif [[ $BACKEND == meg* ]]; then
    MODEL+=(actor_rollout_ref.actor.megatron.param_offload=True)
else
    echo "unknown backend" >&2; exit 1
fi
EMPTY=()
case "$1" in
    big|huge) size=64 ;;
    *) size=4;;
esac
LAUNCH=(python3)
command -v uv && LAUNCH=(uv run --frozen python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${MODEL[@]}" "${EMPTY[@]}" \\
    actor_rollout_ref.rollout.n=$size trainer.n_gpus_per_node=1 "${@:2}"
"""
WRAPPED = """\
run() {
    local name=$1; shift
    ray job submit --runtime-env="$ENV_FILE" --working-dir . \\
        -- python3 -m recipe.dapo.main_dapo "$@" trainer.experiment_name="$name-$(basename /x/y.z .z)"
}
for size in 4 8; do
    [ $size -gt 4 ] || continue
    run "big_${size}" actor_rollout_ref.model.path=org/small-1b data.train_batch_size=$size actor_rollout_ref.actor.ppo_mini_batch_size=4
done
"""  # noqa: E501
TEXT = """\
ENTRY=${ENTRY:-"-m verl.trainer.sft_trainer"}
TRAIN=~/c/train.parquet
while [[ $# -gt 0 ]]; do
    case $1 in
        --gpus) GPUS="$2"; shift 2;;
        *) shift;;
    esac
done
OPTIONS="\\
    optim.lr=1e-5 \\
    optim.betas="[0.9,0.95]" \\
    engine.ulysses_sequence_parallel_size=2"
cat > patch.py << EOF
torchrun -m verl.trainer.sft_trainer model.path=wrong optim.lr=1
EOF
torchrun --standalone --nnodes=1 --nproc_per_node=${GPUS:-8} ${ENTRY} \\
    data.train_files="${TRAIN}" data.train_batch_size=32 model.path=org/small-1b ${OPTIONS} \\
    trainer.default_local_dir="${HOME:?}/out" \\
    # trainer.total_epochs=7
"""
COLUMNS = """\
if [ "$#" -lt 2 ]; then
    echo "Usage: run.sh <ranks> <folder> [overrides...]"
    exit 1
fi
ranks=$1
folder=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$ranks \\
     -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=$HOME/c/train.parquet data.val_files=$HOME/c/test.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    optim.lr=1e-4 data.micro_batch_size_per_gpu=4 model.partial_pretrain=org/small-1b \\
    trainer.default_local_dir=$folder trainer.project_name=p trainer.logger=['console'] trainer.default_hdfs_dir=null $@ \\
    model.lora_rank=32\\
    model.lora_alpha=16 \\
    model.target_modules=all-linear
"""  # noqa: E501


def written(tmp_path: Path, text: str, *arguments: str, name: str = "run.sh") -> WrittenConfig:
    file = tmp_path / name
    file.write_text(text)
    return source_of(read_launch(str(file), arguments))


def invoke(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["config", "import", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------------- scripts


def test_a_plain_script(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    source = written(tmp_path, PLAIN, "trainer.total_epochs=3", "++trainer.nnodes=1")
    assert source.written == {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": ["/h/a/train.parquet", "/h/b/train.parquet"],
        "data.train_batch_size": 64,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 3072,
        "data.truncation": "error",
        "actor_rollout_ref.model.path": "org/small-1b",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.fsdp_config.param_offload": False,
        "trainer.logger": ["console", "wandb"],
        "trainer.n_gpus_per_node": 2,
        "trainer.total_epochs": 3,
        "trainer.nnodes": 1,
    }
    assert (source.unread, source.missing) == ((), ())
    monkeypatch.setenv("MODEL_PATH", "/models/own")
    assert written(tmp_path, PLAIN).written["actor_rollout_ref.model.path"] == "org/small-1b", (
        "the environment is not that of the run"
    )


def test_arrays_conditions_and_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    found = written(tmp_path, ARRAYS, "big", "trainer.nnodes=1").written
    assert found["data.train_files"] == "/h/a.parquet"
    assert (found["data.train_batch_size"], found["data.extra"], found["actor_rollout_ref.rollout.n"]) == (
        16,
        ["x", "y"],
        64,
    )
    assert found["actor_rollout_ref.actor.fsdp_config.param_offload"] is True
    assert found["trainer.nnodes"] == 1
    found = written(tmp_path, f"BACKEND=megatron\nGROUPS_PER_STEP=32\n{ARRAYS}").written
    assert found["actor_rollout_ref.actor.megatron.param_offload"] is True
    assert (found["data.train_batch_size"], found["actor_rollout_ref.rollout.n"]) == (32, 4)


def test_functions_loops_and_wrapped_commands(tmp_path):
    source = written(tmp_path, WRAPPED)
    assert source.written["trainer.experiment_name"] == "big_8-y"
    assert source.written["data.train_batch_size"] == 8
    assert source.unread == ()


def test_a_script_of_supervised_training_becomes_a_config_of_agentrl_sft(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    (tmp_path / "sft.sh").write_text(TEXT)
    code, _, account = invoke(tmp_path / "sft.sh", "--out", tmp_path / "sft.yaml", "--", "--gpus", "4")
    assert code == 0, account
    config = load_sft_config(str(tmp_path / "sft.yaml"))
    assert (config.model.path, config.data.train_files, config.trainer.batch_size) == (
        "org/small-1b",
        ("/h/c/train.parquet",),
        32,
    )
    assert (config.learner.world_size, config.learner.sequence_parallel, config.learner.optimizer.lr) == (
        4,
        2,
        1e-5,
    )
    assert (config.learner.optimizer.betas, config.learner.optimizer.schedule) == ((0.9, 0.95), "constant")
    assert (config.data.messages_key, config.data.prompt_key, config.trainer.output) == (
        "messages",
        None,
        "/h/out",
    )
    assert (config.trainer.total_epochs, config.learner.microbatch_tokens) == (4, 2 * 8192)


def test_columns_within_a_struct_and_an_adapter(tmp_path):
    (tmp_path / "sft.sh").write_text(COLUMNS)
    code, _, account = invoke(
        tmp_path / "sft.sh",
        "2",
        tmp_path / "out",
        "trainer.total_epochs=1",
        "optim.warmup_steps_ratio=0",
        "--out",
        tmp_path / "sft.yaml",
    )
    assert code == 0
    config = load_sft_config(str(tmp_path / "sft.yaml"))
    assert (config.data.prompt_key, config.data.response_key) == ("extra_info.question", "extra_info.answer")
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.target_modules) == (32, 16, ())
    assert (config.learner.world_size, config.trainer.output, config.trainer.total_epochs) == (
        2,
        str(tmp_path / "out"),
        1,
    )
    assert (
        config.learner.optimizer.schedule,
        config.trainer.batch_size,
        config.learner.microbatch_tokens,
    ) == ("cosine", 256, 4096)
    assert "unknown" not in account
    code, _, account = invoke(tmp_path / "sft.sh")
    assert (
        "trainer.default_local_dir=$2: $2 is not set by the script; give it as trainer.default_local_dir=..."
        in account
    )


@pytest.mark.parametrize("truncation", ["error", "right", "left"])
def test_what_becomes_of_long_conversations_is_said(truncation):
    source = WrittenConfig(
        {"data.truncation": truncation, "model.partial_pretrain": "m"},
        defaults=OF_COLUMNS,
        is_supervised=True,
    )
    translation = translate(source)
    assert translation.values.get("data", {}).get("overlong") == {"error": "drop", "right": "truncate"}.get(
        truncation
    )
    decisive = [finding.old for finding in translation.decisive]
    assert ("data.truncation" in decisive) is (truncation == "left")


def test_what_only_a_program_could_tell_is_said_and_left_out(tmp_path):
    text = (
        "commit=$(git rev-parse HEAD)\npython3 -m verl.trainer.main_ppo data.train_batch_size=4 "
        'trainer.experiment_name="a-$commit" \\\n'
    )
    source = written(
        tmp_path,
        text + '  trainer.project_name="$UNHEARD_OF" actor_rollout_ref.actor.ppo_mini_batch_size=$((4 / 2))',
    )
    assert source.written == {"data.train_batch_size": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 2}
    assert source.unread == (
        "trainer.experiment_name=a-$(git rev-parse HEAD): "
        "only known when $(git rev-parse HEAD) runs; give it as trainer.experiment_name=...",
        "trainer.project_name=$UNHEARD_OF: $UNHEARD_OF is not set by the script; "
        "give it as trainer.project_name=...",
    )
    given = written(tmp_path, text, "trainer.experiment_name=mine")
    assert (given.written["trainer.experiment_name"], given.unread) == ("mine", ())


def test_a_comment_ends_the_command_as_it_does_for_a_shell(tmp_path):
    text = (
        "python3 -m verl.trainer.main_ppo data.train_batch_size=4 \\\n  # data.a=1 \\\n  trainer.nnodes=2 "
        "\\\n  trainer.seed=3\n"
    )
    source = written(tmp_path, text)
    assert source.written == {"data.train_batch_size": 4}
    assert source.unread == (
        "line 3: trainer.nnodes=2 does not belong to the command above it, which ends at a comment or blank "
        "line",
    )


def test_several_trainings_and_programs_of_a_recipe_are_told(tmp_path):
    text = (
        "python -m verl.model_merger merge --a b\nfor n in 1 2 3; do python -m recipe.own.main_own "
        "trainer.nnodes=$n; done\n"
    )
    source = written(tmp_path, text)
    assert source.written == {"trainer.nnodes": 1}
    assert "2 more training commands were ignored; only the first was read" in source.unread
    assert [text.partition(";")[0] for text in source.missing] == [
        "recipe.own.main_own is a separate program"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo hello\n", "contains no known training command"),
        ("python3 -m verl.trainer.main_ppo 'data.x=1\n", "line 1: the quote ' is not closed"),
        ("if true; then\npython3 -m x a.b=1\n", "the script ends before elif or else or fi"),
        ("f() { f; }\nf\n", "nested"),
        (
            "while true; do while true; do while true; do x=1; y=2; z=3; done; done; done\n",
            "contains no known training command",
        ),
        ("x=${a\n", r"\{ is not closed"),
    ],
)
def test_scripts_that_cannot_be_read_are_refused_in_one_line(tmp_path, text, problem):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match=problem) as raised:
        read_launch(str(tmp_path / "run.sh"), [])
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="does not exist"):
        read_launch(str(tmp_path / "no.sh"), [])


START = "python3 -m verl.trainer.main_ppo data.train_batch_size=4 "
DEEP = 5_000
REPEATING = " ".join(f"'data.a{n + 1}=${{data.a{n}}}${{data.a{n}}}'" for n in range(40))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"x=ab; for i in {'a ' * 60}; do x=$x$x; done\n{START}", "expand to more than"),
        (f"x=(ab); for i in {'a ' * 60}; do x+=(${{x[@]}}); done\n{START}", "expand to more than"),
        (f"x={'ab' * 9_000}; y=${{x//a/$x}}\n{START}", "expand to more than"),
        (f"x={'ab' * 9_000}; y=${{x%%a*a*a*c}}\n{START}", "expand to more than"),
        ("f() { f; f; }; f\n" + START, "nested more than"),
        (f"echo {'a' * 300_000}\n{START}", "at most 200,000 are"),
        (f"x={'$(' * DEEP}a{')' * DEEP}\n{START}", "nested"),
        (f"{'( ' * DEEP}a{' )' * DEEP}\n{START}", "nested"),
        (f"x={'${a:-' * DEEP}b{'}' * DEEP}\n{START}", "nested"),
        (f"{START} data.x={'[' * DEEP}{']' * DEEP}", "500 brackets"),
        (f"{START} data.x={'[' * 400}{']' * 400}", "nested too deeply|cannot be read"),
        (f"{START} data.x={'a' * 30_000}", "20,000 characters"),
        (START + REPEATING, "repeat"),
    ],
)
def test_no_script_takes_for_ever_or_ends_in_a_traceback(tmp_path, text, problem):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match=problem) as raised:
        invoke(tmp_path / "run.sh")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1_500 + len(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "x=$((9**9**9)); y=$((x & 1)); z=$((1 << 99)); w=$((é + 1))",
        f"x=$(({'(' * DEEP}1{')' * DEEP}))",
        f"{'(' * DEEP}a{')' * DEEP}",
        f"x=$(({'1+' * DEEP}1))",
        f"[[ {'a' * 40}b =~ ^(a+)+$ ]]; [[ a =~ ( ]]",
    ],
)
def test_what_a_script_computes_too_large_is_unknown(tmp_path, text):
    assert written(tmp_path, f"{text}\n{START}").written == {"data.train_batch_size": 4}


def test_a_counting_loop_is_read_once(tmp_path):
    text = "N=3\nfor ((i = 1; i < N; i++)); do\n  names[0]=$i; last=n$i\ndone\n" + START
    found = written(tmp_path, text + "data.a=$last\n").written
    assert found["data.a"] == "n1"


def test_a_placeholder_is_named(tmp_path):
    source = written(tmp_path, 'MODEL="<path_to_config>"\n' + START + "actor_rollout_ref.model.path=$MODEL")
    assert source.written == {"data.train_batch_size": 4}
    assert source.missing == (
        "actor_rollout_ref.model.path=<path_to_config>: a placeholder; give it as "
        "actor_rollout_ref.model.path=...",
    )
    with pytest.raises(ConfigError, match="has the placeholder <your_model>; write a value in its place"):
        invoke("actor_rollout_ref.model.path=<your_model>")
    assert written(tmp_path, START + "\"data.a='<think>'\"").written["data.a"] == "<think>"


def test_the_environment_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    text = (
        START
        + "data.a=$A_TOKEN data.b=${A_TOKEN:-none} 'data.c=${oc.env:A_TOKEN}' 'data.d=${oc.env:A_TOKEN,e}' "
        "'+data.f={g: \"${oc.env:A_TOKEN}\"}'"
    )
    source = written(tmp_path, text)
    assert source.written == {"data.train_batch_size": 4, "data.b": "none", "data.d": "e"}
    assert [note.partition(":")[0] for note in source.missing] == ["data.a=$A_TOKEN", "data.c", "data.f.g"]
    assert "secret" not in str(source)


def test_nothing_of_a_script_is_run(tmp_path):
    text = (
        f"touch {tmp_path}/a; x=$(touch {tmp_path}/b); `touch {tmp_path}/c`; eval 'touch {tmp_path}/d'; bash "
        f"-c 'touch {tmp_path}/e'\n"
    )
    written(tmp_path, text + "python3 -m verl.trainer.main_ppo data.train_batch_size=4 > out.txt\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


BASH = """\
a='one two'; b=(x "$a" 'y z'); b+=(w); c=${d:-$a}; e=${a#one }; f=${a%% *}; g=${a/two/2}; h=${a^^}; i=${#b[@]}; j=$(( (3 + 4) * 5 % 8 ))
k=$(dirname /p/q/r.txt)/$(basename /p/q/r.txt .txt); l="q\\"uo$a\\$x"; m=${b[1]}; n="${b[*]}"; o=~/x; p=${1:-none}; q=${a:4:2}
[[ $a == one* && -n $c ]] && r=yes || r=no
if [ "$i" -eq 4 ] && ! [ -z "$e" ]; then s=$i; else s=no; fi
t=; for u in ${b[@]}; do t+="<$u>"; [ "$u" = x ] && continue; [[ $u == y ]] && break; done
case $f in o?e) v=1;; *) v=2;; esac
w=$'a\\tb'; set -- 1 2 3; shift; x="$# $*"; { y=in; }; (y=out)
A=(p q); B="$(IFS=,; echo "[${A[*]}]")"; C="${B//q/\\=}"; D=$(((2*(3))))$(cd -- /tmp/.. && pwd); E=1 `# nothing`
z=${undefined+set}${a:+set}
printf '%s\\n' "$a" "${b[@]}" "$c" "$e" "$f" "$g" "$h" "$i" "$j" "$k" "$l" "$m" "$n" "$o" "$p" "$q" "$r" "$s" "$t" \\
  "$v" "$w" "$x" "$y" "$z" "$B" "$C" "$D" "$E"
"""  # noqa: E501


def test_values_are_those_of_bash(tmp_path):
    """The same script by bash itself, which every developer's machine and CI have."""
    said = subprocess.run(
        ["bash", "-c", BASH], capture_output=True, text=True, check=True, env={**os.environ, "HOME": "/h"}
    )
    shell = Shell([], tmp_path / "run.sh")
    shell.variables["HOME"] = "/h"
    os.environ["HOME"], home = "/h", os.environ.get("HOME", "")
    try:
        shell.run(BASH)
    finally:
        os.environ["HOME"] = home
    [(_, words)] = shell.started
    assert words[:2] == ["printf", "%s\\n"]
    assert words[2:] == said.stdout.split("\n")[:-1]


PARTS = st.sampled_from(
    [
        "a",
        "$a",
        '"$a b"',
        "${a:-x}",
        "'",
        '"',
        "(",
        ")",
        "$(",
        "{",
        "}",
        "$((1",
        "))",
        ";",
        "&&",
        "|",
        "\n",
        "if",
        "fi",
        "\\",
        "<<E",
        "for",
        "`",
    ]
)


@given(st.lists(PARTS, max_size=12))
@settings(max_examples=300, deadline=None)
def test_whatever_stands_in_a_script_it_is_read_or_refused(parts):
    try:
        Shell([], Path("run.sh")).run(" ".join(parts))
    except ConfigError as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said or "\n" in parts


# ---------------------------------------------------------------------------------------------------- configs


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of verl with a recipe, whose config has another one below it."""
    for folder in ("recipe/own/config", "verl/trainer/config", "examples/turns/config"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "recipe/own/config/own_trainer.yaml").write_text(
        "defaults: [ppo_trainer, base, _self_]\ndata: {train_batch_size: 48}\n"
    )
    (tmp_path / "recipe/own/config/base.yaml").write_text(
        "data: {train_batch_size: 1, max_prompt_length: 77}\n"
    )
    text = (
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, _self_, optim@o: adam]\nactor_rollout_ref: "
        "{rollout: {name: sglang}}\n"
    )
    (tmp_path / "examples/turns/config/turns_grpo.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_a_config_path_is_relative_to_the_folder_of_the_module(
    checkout, monkeypatch, tmp_path_factory, place
):
    (checkout / "recipe/own/run.sh").write_text(
        "python3 -m recipe.own.main_own --config-path=config --config-name own_trainer data.seed=1\n"
    )
    if place == "elsewhere":
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    source = source_of(read_launch(str(checkout / "recipe/own/run.sh"), []))
    assert source.written == {"data.train_batch_size": 48, "data.max_prompt_length": 77, "data.seed": 1}
    assert not any("not found" in text for text in source.missing)


def test_a_config_path_of_a_script_may_be_a_folder_of_the_checkout(checkout):
    text = (
        'D="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$D/examples/turns/config" '
        "--config-name='turns_grpo' data.seed=1\n"
    )
    source = written(checkout, text)
    assert source.written == {"actor_rollout_ref.rollout.name": "sglang", "data.seed": 1}
    assert source.unread == ("defaults: {'optim@o': 'adam'}: give its settings as overrides",)


def test_options_in_place_of_the_command_find_the_config_too(checkout):
    out = checkout / "run.yaml"
    code, _, _ = invoke(
        "--config-path=examples/turns/config",
        "--config-name=turns_grpo",
        "data.train_batch_size=512",
        "--out",
        out,
    )
    assert code == 0
    assert yaml.safe_load(out.read_text())["buffer"]["groups_per_step"] == 512


def test_a_config_that_is_not_found_stops_the_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(
        "python3 -m recipe.own.main_own --config-path=config --config-name own_trainer "
        "data.train_batch_size=512\n"
    )
    code, text, account = invoke("run.sh")
    assert (code, text) == (1, "")
    assert account.startswith(
        "will not run as it is: 2\n  the config: own_trainer.yaml in config was not found"
    )
    code, text, _ = invoke("run.sh", "--force")
    assert (code, yaml.safe_load(text)["buffer"]["groups_per_step"]) == (0, 512)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tools: [{class_name: a.B, config: {}}]", "this is not a config of a verl trainer: 1 of its 1 keys"),
        (
            "services: {web: {image: nginx, ports: [80]}}",
            "this is not a config of a verl trainer: 2 of its 2 keys",
        ),
        (
            "model_name_or_path: m\nlearning_rate: 1e-5\nlogging_steps: 1",
            "this is not a config of a verl trainer",
        ),
        (
            "trainer: {max_steps: 3, devices: 8}\nmodel: {hidden: 8}\ndata: {train_files: [a]}",
            "3 of its 4 keys are unknown",
        ),
        ("learner: {world_size: 2}\nbuffer: {groups_per_step: 4}", "learner.world_size is a key of agentrl"),
        ("- a\n- b", "a config of verl must be a mapping of sections"),
    ],
)
def test_a_file_that_is_no_trainer_config_is_refused(tmp_path, text, problem):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        invoke(tmp_path / "c.yaml")


# -------------------------------------------------------------------------------------------------- obstacles

MODEL = "actor_rollout_ref.model.path"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (f"{ROLLOUT}.tensor_model_parallel_size=16", "half of the GPUs cannot be theirs"),
        (f"{ROLLOUT}.pipeline_model_parallel_size=2", "half of the GPUs cannot be theirs"),
        ("data.custom_cls.path=rows.py", "read by your Dataset class"),
        ("data.datagen.path=rows.py", "made by your class"),
        (f"{ROLLOUT}.expert_parallel_size=4", "no expert parallelism"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "no tensor parallelism of Megatron"),
        (f"{ACTOR}.megatron.pipeline_model_parallel_size=4", "no pipeline parallelism"),
        (f"{ACTOR}.megatron.context_parallel_size=2", "no context parallelism"),
        (f"{ACTOR}.megatron.expert_model_parallel_size=8", "no expert parallelism of Megatron"),
        ("critic.megatron.pipeline_model_parallel_size=2", "no pipeline parallelism"),
        (f"{MODEL}=Qwen/Qwen3-Next-80B-A3B", "a mixture of experts"),
        (f"{MODEL}=Qwen/Qwen3-VL-8B-Instruct", "a model for images"),
        (f"{MODEL}=Qwen/Qwen3-8B-FP8", "quantized"),
        ("data.video_key=videos", "are not supported"),
        (f"{ROLLOUT}.quantization=fp8", "never quantized"),
        (f"+{ACTOR}.megatron.override_transformer_config.fp8=hybrid", "never quantized"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8", "never quantized"),
        (f"{ACTOR}.qat.enable=True", "not trained for quantized serving"),
        ("distillation.enabled=True", "algorithm.distillation"),
        ("algorithm.use_pf_ppo=True", "not reweighted"),
    ],
)
def test_what_would_not_run_comes_first_and_nothing_is_written(tmp_path, override, why):
    out = tmp_path / "run.yaml"
    words = ["data.train_batch_size=512", override, "--out", out]
    code, _, account = invoke(*words)
    assert (code, out.exists()) == (1, False)
    first, second, *_ = account.splitlines()
    assert first == "will not run as it is: 1"
    assert second.startswith(f"  {override.lstrip('+').replace('=', ' = ')}: ")
    assert why in second
    assert account.endswith("nothing was written; --force writes the keys that can be translated\n")
    code, _, account = invoke(*words, "--force")
    assert code == 0
    assert account.startswith("will not run as it is: 1\n")
    load_config(str(out))


OPTIM = f"{ACTOR}.optim"
OVERLONG = "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("algorithm.adv_estimator=unheard_of", "unknown estimator unheard_of"),
        ("algorithm.adv_estimator=gpg", "whose reward is not 0"),
        ("algorithm.adv_estimator=grpo_passk", "divides by the standard deviation"),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "whitens groups of equal outcomes too"),
        (f"{ACTOR}.policy_loss.loss_mode=unheard_of", "unknown policy loss unheard_of"),
        (f"{ACTOR}.loss_agg_mode=token-sum", "token-sum has no counterpart"),
        (f"{ACTOR}.kl_loss_type=k1 {ACTOR}.use_kl_loss=True", "its expected gradient is zero"),
        ("algorithm.kl_penalty=full algorithm.use_kl_in_reward=True", "it is unknown"),
        (f"{ROLLOUT}.agent.default_agent_loop=mine", "your own class"),
        ("reward_model.reward_manager=mine", "your own class"),
        ("actor_rollout_ref.model.override_config.max_position_embeddings=32768", "own config.json counts"),
        (f"{OPTIM}.min_lr_ratio=0.1 {OPTIM}.lr_scheduler_type=cosine", "decays to 0 over the run"),
        (f"{OPTIM}.lr_scheduler_type=wsd", "wsd has no counterpart"),
        (f"{OPTIM}.lr_warmup_steps_ratio=0.1", "give trainer.total_training_steps too"),
        ("data.sampler.class_name=Mine", "your own sampler"),
        (f"{ROLLOUT}.top_p=0.9", "must sample from the full distribution"),
        (f"{ACTOR}.entropy_coeff=-1", "must be at least 0"),
        (
            f"+algorithm.filter_groups.metric=acc +algorithm.filter_groups.enable=True {OVERLONG}",
            "length penalty",
        ),
        (
            "+algorithm.filter_groups.metric=acc +algorithm.filter_groups.enable=True "
            "reward.custom_reward_function.path=f.py",
            "your function's acc",
        ),
    ],
)
def test_what_would_train_something_else_is_said_and_nothing_is_written(tmp_path, overrides, why):
    out = tmp_path / "run.yaml"
    words = ["data.train_batch_size=256", f"{ROLLOUT}.n=4", *overrides.split(), "--out", out]
    code, _, account = invoke(*words)
    assert (code, out.exists()) == (1, False)
    first, second, *_ = account.splitlines()
    assert first == "trains something else: 1"
    assert second.startswith(f"  {overrides.partition(' ')[0].lstrip('+').replace('=', ' = ')}: ")
    assert why in second
    code, _, account = invoke(*words, "--force")
    assert code == 0
    load_config(str(out))


def test_variants_that_compute_the_same_are_translated():
    for overrides in (
        "algorithm.adv_estimator=grpo_passk algorithm.norm_adv_by_std_in_grpo=False",
        "algorithm.adv_estimator=reinforce_plus_plus_baseline +algorithm.filter_groups.enable=True",
        f"{OPTIM}.min_lr_ratio=0.1",
        f"{OPTIM}.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=100",
        f"{OPTIM}.lr_decay_style=cosine {OPTIM}.min_lr=0",
        "actor_rollout_ref.model.override_config.attention_dropout=0.0",
        "algorithm.filter_groups.metric=seq_reward algorithm.filter_groups.enable=True",
    ):
        words = ["data.train_batch_size=256", f"{ROLLOUT}.n=4", *overrides.split()]
        assert invoke(*words)[0] == 0, overrides


def test_a_wrong_answer_of_dapos_rows_costs_as_much_as_in_verl():
    words = ["data.train_batch_size=256", f"{ROLLOUT}.n=4", "data.train_files=data/dapo-math-17k.parquet"]
    rewards = yaml.safe_load(invoke(*words)[1])["reward"]["reward_config"]
    assert rewards == {"math": {"wrong_score": -1}, "aime": {"wrong_score": -1}}
    words[-1] = "data.train_files=gsm8k.parquet"
    assert "reward" not in yaml.safe_load(invoke(*words)[1])


@pytest.mark.parametrize(
    ("overrides", "servers", "learner", "width"),
    [
        (f"{MODEL}=Qwen/Qwen2.5-7B-Instruct {ROLLOUT}.tensor_model_parallel_size=4", 8, 8, None),
        (f"{MODEL}=/models/a-3b {ROLLOUT}.pipeline_model_parallel_size=2", 8, 8, None),
        (f"{MODEL}=Qwen/Qwen2.5-32B {ROLLOUT}.tensor_model_parallel_size=4", 1, 4, 4),
        (f"{MODEL}=Qwen/Qwen2.5-32B {ROLLOUT}.tensor_model_parallel_size=8", 1, 4, 4),
        (f"{MODEL}=mine {ROLLOUT}.tensor_model_parallel_size=2", 2, 4, 2),
        (f"{MODEL}=mine {ROLLOUT}.tensor_model_parallel_size=8 trainer.nnodes=5", 2, 24, 8),
        (
            f"{MODEL}=mine-7b {ROLLOUT}.tensor_model_parallel_size=2 {ACTOR}.fsdp_config.fsdp_size=16",
            8,
            8,
            None,
        ),
    ],
)
def test_servers_of_several_gpus_on_the_learners_become_small_or_get_half(overrides, servers, learner, width):
    code, text, account = invoke("data.train_batch_size=256", *overrides.split())
    assert code == 0, account
    config = Config.model_validate(yaml.safe_load(text))
    assert (config.rollout.num_servers, config.learner.world_size) == (servers, learner)
    assert config.rollout.colocated is (width is None)
    assert config.rollout.sglang.args.get("tp_size") == width
    assert ("GPUs of their own here" if width else "holds a server of this model") in account


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=1",
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=null",
        f"{ROLLOUT}.quantization=null",
        f"{ACTOR}.fsdp_config.model_dtype=bf16",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "data.image_key=null",
        "reward_model.reward_manager=naive",
        f"{MODEL}=Qwen/Qwen2.5-7B-Instruct",
        "trainer.experiment_name=fp8",
    ],
)
def test_what_runs_is_no_obstacle(override):
    code, _, account = invoke("data.train_batch_size=512", override)
    assert (code, "will not run" in account) == (0, False)


def test_servers_with_gpus_of_their_own_may_have_several_each():
    words = [
        "data.train_batch_size=512",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.pipeline_model_parallel_size=2",
    ]
    code, text, _ = invoke(*words, f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8")
    assert code == 0
    rollout = yaml.safe_load(text)["rollout"]
    assert (rollout["num_servers"], rollout["sglang"]["args"]) == (2, {"tp_size": 2, "pp_size": 2})


# ------------------------------------------------------------------------------------------------- algorithms


@pytest.mark.parametrize(
    ("estimator", "whitens"),
    [("gae", True), ("grpo", False), ("rloo", False), ("reinforce_plus_plus", False)],
)
def test_advantages_of_gae_are_whitened_as_verl_does_in_any_case(estimator, whitens):
    """Estimators of the REINFORCE family whiten by themselves, here as there."""
    algorithm = translate(
        WrittenConfig({"algorithm.adv_estimator": estimator, "data.train_batch_size": 8})
    ).values["algorithm"]
    assert algorithm.get("whiten", False) is whitens
    if whitens:
        assert translate(WrittenConfig({})).values["algorithm"]["whiten"], (
            "gae is what verl does where nothing is written"
        )


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_of_one_learns_from_its_reward_as_in_verl(estimator):
    """verl's default is one attempt per prompt; its estimators of groups then take the reward as it is."""
    options = {"algorithm.adv_estimator": estimator, "data.train_batch_size": 8}
    assert translate(WrittenConfig(options)).values["algorithm"]["singleton"] == "raw"
    assert (
        "singleton"
        not in translate(WrittenConfig({**options, "actor_rollout_ref.rollout.n": 4})).values["algorithm"]
    )


@pytest.mark.parametrize("section", ["reward_model.reward_kwargs", "reward.reward_kwargs", "reward_model"])
def test_scores_for_the_form_reach_the_rewards_that_score_the_rows(section):
    options = {f"{section}.format_score": 0.1, "data.train_batch_size": 8}
    translation = translate(WrittenConfig(options))
    assert translation.values["reward"]["reward_config"] == {
        "gsm8k": {"format_score": 0.1},
        "math": {"format_score": 0.1},
    }
    assert translation.unknown == ()
    strict = translate(WrittenConfig({f"{section}.method": "flexible", "data.train_batch_size": 8})).values[
        "reward"
    ]["reward_config"]
    assert strict == {"gsm8k": {"strict": False}}


def test_a_launch_is_told_from_other_programs():
    assert launch_of(["python3", "-m", "verl.trainer.main_ppo", "data.a=1"]).module == "verl.trainer.main_ppo"
    assert (
        launch_of(["python3", "verl/trainer/main_ppo.py", "trainer.nnodes=1"]).module
        == "verl.trainer.main_ppo"
    )
    assert launch_of(
        ["torchrun", "--nproc_per_node", "4", "-m", "verl.trainer.sft_trainer", "optim.lr=1"]
    ).ranks == ("trainer.n_gpus_per_node=4",)
    for words in (
        ["python3", "-m", "sglang.launch_server", "--port=1"],
        ["python", "data/gsm8k.py", "--dir=x"],
        ["ray", "start"],
        ["ls"],
    ):
        assert launch_of(words) is None


def test_a_whole_config_of_verl_may_name_columns_that_no_row_has():
    media = {"data.image_key": "images", "data.video_key": "videos", "data.train_batch_size": 8}
    assert translate(WrittenConfig(media)).obstacles == ()
    assert len(translate(WrittenConfig(media | {"data.video_key": "films"})).obstacles) == 1


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("data: {max_length: 99, messages_key: m}", "null"),
        ("model: {partial_pretrain: m}", "20"),  # a tenth of them is the warm-up
        ("model: {path: m}\noptim: {lr: 1e-5}", "null"),
    ],
)
def test_a_file_of_supervised_training_is_known_by_its_keys(tmp_path, text, steps):
    (tmp_path / "sft.yaml").write_text(
        f"{text}\ntrainer: {{max_ckpt_to_keep: null, total_training_steps: {steps}}}\n"
    )
    code, _, account = invoke(tmp_path / "sft.yaml", "--out", tmp_path / "out.yaml")
    assert (code, "unknown" in account) == (0, False)
    load_sft_config(str(tmp_path / "out.yaml"))


def test_a_loop_that_watches_for_ever_hides_no_training(tmp_path):
    text = (
        "watch() { while true; do while true; do x=1; y=2; z=3; done; done; }\npython3 -m "
        "verl.trainer.main_ppo data.seed=1\nwatch &\n"
    )
    source = written(tmp_path, text)
    assert (source.written, source.unread) == (
        {"data.seed": 1},
        ("the script has more than 20000 commands and was not read to its end",),
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("actor_rollout_ref.actor.sppo_eta=1.0", "unknown: 1, neither"),
        ("+reward_model.reward_kwargs.elliptical.alpha=1.0", "unknown: 1, neither"),
        ("+algorithm.made_up=2", "unknown: 1, neither"),
        ("actor_rollout_ref.actor.use_kl_loss=$KL", "$KL is not set by the script"),
        ("actor_rollout_ref.rollout.over_sample_rate=0.1", "no attempt is ended because others were faster"),
        ("actor_rollout_ref.actor.optim.optimizer=Muon", "the optimizer is AdamW"),
        ("+critic.optim.override_optimizer_config.decoupled=false", ""),
        ("reward_model.reward_loop_class_name=Own", "attempts are scored by your class"),
        ("trainer.nnodes=$NODES", ""),
        ("+algorithm.made_up=false data.max_prompt_length=64 algorithm._target_=verl.AlgoConfig", ""),
        ("actor_rollout_ref.actor.optim.optimizer=AdamW", ""),
    ],
)
def test_what_nobody_can_judge_ends_with_exit_code_1(tmp_path, words, told):
    (tmp_path / "run.sh").write_text(f"{START}{words}\n")
    code, _, account = invoke(tmp_path / "run.sh")
    assert (code, told in account) == (int(bool(told)), True), account
    assert invoke(tmp_path / "run.sh", "--force")[0] == 0


@pytest.mark.parametrize(
    ("module", "is_own"),
    [
        ("verl.trainer.main_ppo", True),
        ("recipe.dapo.main_dapo", True),
        ("verl.experimental.one_step_off_policy.main_ppo", True),
        ("verl.experimental.vla.main_ppo", False),
        ("recipe.partial_rollout.main_ppo", False),
        ("recipe.sppo.main_sppo", False),
    ],
)
def test_a_program_of_another_loss_or_loop_is_none_of_verls_trainers(tmp_path, module, is_own):
    (tmp_path / "run.sh").write_text(f"python3 -m {module} data.train_batch_size=4\n")
    code, _, account = invoke(tmp_path / "run.sh")
    assert (code, "is a separate program" in account) == (int(not is_own), not is_own)


def test_verls_asynchronous_trainer_compares_with_the_servers_log_probabilities():
    sizes = {"async_training.require_batches": 1, "async_training.trigger_parameter_sync_step": 1}
    mode = "algorithm.rollout_correction.bypass_mode"
    for more, is_bypass in (
        ({}, True),
        ({mode: False}, False),
        ({"async_training.compute_prox_log_prob": True}, False),
        ({"async_training.use_rollout_log_probs": False}, False),
    ):
        algorithm = translate(WrittenConfig(sizes | more)).values["algorithm"]
        assert (algorithm.get("mode") == "bypass") is is_bypass, more


def test_turns_that_verl_does_not_limit_are_limited_by_tokens():
    turns = {f"{ROLLOUT}.multi_turn.enable": True, "data.max_response_length": 2048}
    assert translate(WrittenConfig(turns)).values["agent"]["max_turns"] == 2048


def test_a_model_that_fits_one_gpu_gets_the_memory_it_needs_there(tmp_path):
    words = (
        f"{MODEL}=Qwen/Qwen2.5-14B-Instruct {ROLLOUT}.tensor_model_parallel_size=2 trainer.n_gpus_per_node=2 "
        f"{ROLLOUT}.gpu_memory_utilization=0.25 {ACTOR}.fsdp_config.param_offload=True "
        f"{ACTOR}.fsdp_config.optimizer_offload=True"
    )
    (tmp_path / "run.sh").write_text(f"{START}{words}\n")
    code, text, account = invoke(tmp_path / "run.sh")
    rollout = yaml.safe_load(text)["rollout"]
    assert (code, rollout["num_servers"], rollout["colocated"]) == (0, 2, True), account
    assert rollout["sglang"]["args"] == {"mem_fraction_static": 0.5}
