"""`agentrl replay`: the same weights every time, also when it is resumed; and what the report of corrections
says.
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.schema import Config
from agentrl.config.tracking import AlarmsConfig
from agentrl.data.trajectories import decode, encode, read_parquet, write_parquet
from agentrl.errors import ConfigError, DataError
from agentrl.extras.research.compare_corrections import COLUMNS, CORRECTIONS, variants
from agentrl.extras.research.replay import load_replay_config, replay
from agentrl.extras.research.stored_steps import StoredSteps
from agentrl.extras.watch.rules import rules_from
from agentrl.tracking.metrics import read_metrics
from agentrl.types import RewardEvent
from parts.learner import tiny_sizes
from parts.trajectories import make_trajectory

VOCABULARY = 23
TEMPERATURE = 0.9
SIZES = tiny_sizes(VOCABULARY)
CONFIG = """
model: {{path: {folder}/model}}
rollout: {{group_size: 3, temperature: 0.9}}
buffer: {{groups_per_step: 4, max_staleness: 3}}
learner:
  microbatch_tokens: 48
  minibatches_per_step: 2
  epochs_per_step: 2
  optimizer: {{lr: 1.0e-3, schedule: cosine}}
trainer: {{steps: 4, save_freq: 2, run_dir: {folder}/run, experiment_name: stored, logger: []}}
"""


def plain_logprobs(model, token_ids):
    with torch.no_grad():
        logits = model(torch.tensor(token_ids[None], dtype=torch.int64)).logits[0, :-1].double() / TEMPERATURE
    picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(token_ids[1:, None], dtype=torch.int64))[
        :, 0
    ]
    return np.concatenate([[0.0], picked.numpy()])


def trajectory(group_id, member, rng, model, *, version, drift):
    """Two turns with context between them; behavior is the model's own log-probability, `drift` away from
    it.
    """
    mask = np.array(
        [False] * 3 + [True] * int(rng.integers(2, 6)) + [False] * 2 + [True] * int(rng.integers(1, 5))
    )
    turns = np.where(mask, np.where(np.arange(len(mask)) < 3 + 5, 0, 1), -1)
    tokens = rng.integers(0, VOCABULARY, len(mask)).astype(np.int32)
    behavior = np.where(mask, plain_logprobs(model, tokens) + rng.normal(0, drift, len(mask)), 0.0)
    reward = RewardEvent("outcome", float(rng.integers(0, 2)), int(np.flatnonzero(mask)[-1]))
    return make_trajectory(
        turns,
        group_id=group_id,
        member=member,
        token_ids=tokens,
        behavior_logprobs=behavior,
        version=version,
        rewards=(reward,),
    )


def write_run(folder, *, drift=0.4, lags=(0, 1, 2, 3), steps=4, first_version=0):
    """A run's folder as `agentrl train` leaves it: config, trajectories, and the model it started from."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    model.save_pretrained(folder / "model")
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(CONFIG.format(folder=folder))
    rng = np.random.default_rng(5)
    for step in range(1, steps + 1):
        learned_by = first_version + step - 1
        batch = [
            trajectory(
                10 * step + g, m, rng, model, version=max(0, learned_by - lags[g % len(lags)]), drift=drift
            )
            for g in range(4)
            for m in range(3)
        ]
        write_parquet(
            folder / f"run/trajectories/step_{step:06d}.parquet",
            encode(batch),
            step=step,
            learned_by=learned_by,
        )
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("stored"))


def play(run, out, *overrides, **options):
    return replay(run, load_replay_config(run, overrides, out=out), **options)


def learned(folder):
    """Everything the learner measured, by step; times differ."""
    return [
        (r.step, {k: v for k, v in r.values.items() if k.startswith("learner/")})
        for r in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    return play(run, tmp_path_factory.mktemp("whole") / "replay")


# ------------------------------------------------------------------------------------------------ determinism


def test_a_replay_learns_every_step_and_writes_what_a_run_writes(run, whole):
    assert whole.step == 4
    records = read_metrics(whole.run_dir / "metrics.jsonl")
    assert [(r.step, r.version, r.values["rollout/lag/max"]) for r in records] == [
        (1, 1, 0),
        (2, 2, 1),
        (3, 3, 2),
        (4, 4, 3),
    ]
    assert all(math.isfinite(r.values["learner/loss"]) and r.values["learner/grad_norm"] > 0 for r in records)
    assert json.loads((whole.run_dir / "result.json").read_text()) == {
        "step": 4,
        "weights_sha256": whole.weights,
    }
    before, after = (
        load_file(run.parent / "model" / "model.safetensors"),
        load_file(whole.model_path / "model.safetensors"),
    )
    assert all(np.abs(after[name] - before[name]).max() > 0 for name in after)
    assert not (whole.run_dir / "trajectories").exists()


def test_again_and_with_the_steps_in_a_folder_of_their_own_it_is_the_same_bit_for_bit(run, whole, tmp_path):
    shutil.copytree(run / "trajectories", tmp_path / "only")
    config = load_replay_config(tmp_path / "only", file=run / "config.yaml")
    again = replay(tmp_path / "only", config)
    assert again.run_dir == tmp_path / "only" / "replay"
    assert again.weights == whole.weights
    assert learned(again.run_dir) == learned(whole.run_dir)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resumed_at_a_step_it_is_uninterrupted_bit_for_bit(run, whole, tmp_path, stop):
    first = play(run, tmp_path / "replay", last_step=stop)
    assert (first.step, first.weights == whole.weights) == (stop, False)
    second = play(run, tmp_path / "replay")
    assert (second.step, second.weights) == (4, whole.weights)
    assert learned(second.run_dir) == learned(whole.run_dir)
    assert (second.model_path / "model.safetensors").read_bytes() == (
        whole.model_path / "model.safetensors"
    ).read_bytes()


PPO = (
    *(
        "algorithm.advantage=gae",
        "algorithm.lam=0.9",
        "algorithm.whiten=true",
        "algorithm.bootstrap_truncated=true",
    ),
    *("critic.optimizer.lr=1e-3", "critic.warmup_steps=1", "critic.epochs_per_step=1"),
    *(
        "algorithm.kl.coefficient=0.1",
        "algorithm.kl.place=reward",
        "algorithm.kl.estimator=k1",
        "algorithm.kl.target=0.01",
    ),
)


def test_with_a_critic_and_kl_in_the_reward_it_is_the_same_whether_resumed_or_not(run, tmp_path):
    """Critic, its optimizer and the adapted coefficient are part of a checkpoint; in the first step the
    critic learns alone.
    """
    once = play(run, tmp_path / "once", *PPO)
    play(run, tmp_path / "replay", *PPO, last_step=2)
    assert play(run, tmp_path / "replay", *PPO).weights == once.weights
    assert learned(tmp_path / "replay") == learned(tmp_path / "once")
    steps = [values for _, values in learned(tmp_path / "once")]
    assert ["learner/loss" in values for values in steps] == [False, True, True, True]
    assert all(values["learner/critic/grad_norm"] > 0 for values in steps)
    coefficients = [values["learner/reward_kl_coefficient"] for values in steps]
    assert coefficients[0] == 0.1
    assert coefficients == sorted(set(coefficients), reverse=True), (
        "while the policy is its own reference, KL is below its target"
    )


def test_from_a_checkpoint_of_before(run, whole, tmp_path):
    later = play(run, tmp_path / "replay", f"trainer.resume_mode={whole.run_dir}/checkpoints/step_000002")
    assert later.weights == whole.weights
    assert [step for step, _ in learned(later.run_dir)] == [3, 4]


def test_an_override_changes_what_is_learned(run, whole, tmp_path):
    assert play(run, tmp_path / "replay", "algorithm.correction.cap=1.1").weights != whole.weights


def test_by_the_command_line(run, whole, tmp_path):
    done = CliRunner().invoke(
        app,
        [
            "replay",
            str(run),
            "learner.microbatch_tokens=48",
            "--out",
            str(tmp_path / "replay"),
            "--last-step",
            "4",
        ],
    )
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "replay" / "result.json").read_text())["weights_sha256"] == whole.weights


def test_alarms_watch_what_a_step_measures(whole):
    """Every metric of a rule is one of a step's, and a replay raises alarms as a run does: here behavior is
    far from the policy.
    """
    elsewhere = {"learner/moved_per_version"}  # only of steps whose tokens have a lag
    for record in read_metrics(whole.run_dir / "metrics.jsonl"):
        assert {
            name
            for rule in rules_from(AlarmsConfig())
            for name in rule.metrics
            if not name.startswith("attempts/")
        } - elsewhere <= set(record.values)
    raised = [json.loads(line) for line in (whole.run_dir / "alarms.jsonl").read_text().splitlines()]
    assert [(line["rule"], line["step"]) for line in raised] == [("logprob_gap", 1), ("policy_moved", 2)]
    assert len(decode(read_parquet(whole.run_dir / "alarms" / "step_000001_logprob_gap.parquet"))) == 12


# ------------------------------------------------------------------------------------------------ wrong input


def test_what_is_missing_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match=r"contains a config.yaml; give one with --config"):
        load_replay_config(tmp_path / "nothing")
    with pytest.raises(DataError, match="contains no trajectories"):
        StoredSteps.find(tmp_path)
    shutil.copytree(run / "trajectories", tmp_path / "trajectories")
    (tmp_path / "trajectories" / "step_000002.parquet").unlink()
    with pytest.raises(
        DataError, match=r"step_000002.parquet is missing; a replay needs every step up to the last, 4"
    ):
        StoredSteps.find(tmp_path)


def test_files_that_do_not_say_who_learned_are_taken_by_their_newest_token(run, tmp_path):
    stored = StoredSteps.find(run)
    assert [stored.read(step).learned_by for step in (1, 4)] == [0, 3]
    trajectories = [t.load() for group in stored.read(4).groups for t in group.trajectories]
    write_parquet(tmp_path / "step_000001.parquet", encode(trajectories))
    assert StoredSteps.find(tmp_path).read(1).learned_by == 3


def test_tokens_of_steps_that_a_run_undid_are_as_far_away_as_they_were_for_the_run(run, tmp_path):
    """Weights of step 1 were published anew as version 3: a token of version 2, of the course given up, is
    one step back and none forth.
    """
    shutil.copytree(run / "trajectories", tmp_path / "trajectories")
    versions = np.array([0, 1, 2, 3], np.int32)
    assert StoredSteps.find(tmp_path).read(4).lineage.lags(versions).tolist() == [3, 2, 1, 0], (
        "by their numbers, where nothing is known"
    )
    write_versions(tmp_path, 0, 1, 2, 1, 2, 3, 4)
    with (tmp_path / "versions.jsonl").open("a") as file:
        file.write('{"version": 7, "st')
    for folder in (tmp_path, tmp_path / "trajectories"):
        stored = StoredSteps.find(folder).read(4)
        assert (stored.learned_by, stored.lineage.lags(versions).tolist()) == (3, [1, 0, 1, 0])
    write_versions(tmp_path, 0, 1, 2, 3, 4, 1, 2, 3)
    assert StoredSteps.find(tmp_path).num_steps == 3, "the fourth is of the course given up"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((0, 1, 2, 3), "lacks the version that step 4 led to"),
        ((0, 1, 2), "lacks version 3, which learned from step 4"),
    ],
)
def test_versions_from_which_lines_were_cut_are_not_replayed(run, tmp_path, steps, words):
    shutil.copytree(run / "trajectories", tmp_path / "trajectories")
    write_versions(tmp_path, *steps)
    with pytest.raises(DataError, match=words):
        StoredSteps.find(tmp_path)


def write_versions(folder, *steps):
    """Write the versions of an untrained model, and of policies after these steps."""
    records = [{"version": 0, "step": 0, "what": "untrained"}]
    records += [{"version": version, "step": step, "what": "policy"} for version, step in enumerate(steps)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "versions.jsonl").write_text(text)


# ----------------------------------------------------------------------------------------------------- report


def report_of(folder):
    """correction -> [line of each step]."""
    lines = json.loads((folder / "corrections.json").read_text())["steps"]
    return {
        name: [line for line in lines if line["correction"] == name]
        for name in dict.fromkeys(line["correction"] for line in lines)
    }


@pytest.fixture(scope="module")
def reported(run, tmp_path_factory):
    return play(run, tmp_path_factory.mktemp("reported") / "replay", report=True)


def test_the_report_changes_nothing_that_is_learned(reported, whole):
    assert reported.weights == whole.weights
    assert learned(reported.run_dir) == learned(whole.run_dir)


def test_the_report_has_every_correction_at_every_step_in_all_its_forms(reported):
    found = report_of(reported.run_dir)
    assert set(found) == {*CORRECTIONS, "configured"} == set(variants(Config().algorithm))
    assert all([line["step"] for line in lines] == [1, 2, 3, 4] for lines in found.values())
    text = reported.report.read_text()
    assert all(f"| {name} |" in text for name in found)
    assert (reported.run_dir / "corrections.png").stat().st_size > 10_000


def test_what_the_columns_mean(reported):
    found = report_of(reported.run_dir)
    for line in found["none"]:
        assert (line["kept"], line["ess"], line["weight_mean"]) == (1.0, 1.0, 1.0)
    for name, lines in found.items():
        assert all(0 <= line["kept"] <= 1 and 0 <= line["ess"] <= line["kept"] + 1e-12 for line in lines), (
            name
        )
        assert all(line["cosine"] is None or -1.000001 <= line["cosine"] <= 1.000001 for line in lines), name
    configured, token = found["configured"], found["token_tis"]  # the default is token TIS with cap 2
    assert [{**a, "correction": ""} for a in configured] == [{**b, "correction": ""} for b in token]
    assert any(line["kept"] < 1 for line in found["geometric_band"])
    assert any(line["kept"] < 1 for line in found["icepop"])
    assert {line["reference"] for line in found["none"]} == {"fresh"}


def test_weights_and_shares_equal_ten_lines_of_numpy(reported, run):
    """At the first step the proximal policy is the model of the run's start, so everything can be counted
    from the files.
    """
    model = Qwen2ForCausalLM.from_pretrained(run.parent / "model")
    ratios = []
    for group in StoredSteps.find(run).read(1).groups:
        for t in (attempt.load() for attempt in group.trajectories):
            log_ratio = (plain_logprobs(model, t.token_ids) - t.behavior_logprobs)[t.action_mask]
            ratios.append(np.exp(log_ratio))
    flat = np.concatenate(ratios)
    icepop = np.where((flat >= 0.5) & (flat <= 5.0), flat, 0.0)
    means = np.concatenate([np.full(len(r), np.exp(np.log(r).mean())) for r in ratios])
    found = {name: lines[0] for name, lines in report_of(reported.run_dir).items()}
    capped = flat.clip(max=2.0)
    assert found["token_tis"]["weight_mean"] == pytest.approx(capped.mean(), rel=1e-4)
    assert found["token_tis"]["ess"] == pytest.approx(
        capped.sum() ** 2 / len(flat) / (capped**2).sum(), rel=1e-4
    )
    assert found["icepop"]["kept"] == pytest.approx((icepop > 0).mean(), abs=1e-9)
    assert found["icepop"]["ess"] == pytest.approx(
        icepop.sum() ** 2 / len(flat) / (icepop**2).sum(), rel=1e-4
    )
    assert found["geometric_band"]["kept"] == pytest.approx(
        ((means >= 0.99) & (means <= 1.01)).mean(), abs=1e-9
    )


def test_loss_gradient_and_cosine_equal_plain_autograd(tmp_path):
    """From the formulas, in float64, with one forward per trajectory: sequence weights on all, against the
    fresh half on policy.
    """
    run = write_run(tmp_path, drift=0.1, lags=(0, 1), steps=1, first_version=3)
    done = play(run, tmp_path / "replay", report=True)
    model = Qwen2ForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float64)
    groups = StoredSteps.find(run).read(1).groups

    def gradient(term_of, chosen):
        terms, count = [], 0
        for group in groups:
            rewards = np.array([t.reward for t in group.trajectories])
            spread = rewards.std(ddof=1)
            for t in (attempt.load() for attempt in group.trajectories):
                if not chosen(t):
                    continue
                logits = (
                    model(torch.tensor(t.token_ids[None], dtype=torch.int64)).logits[0, :-1] / TEMPERATURE
                )
                picked = torch.log_softmax(logits, -1).gather(
                    -1, torch.tensor(t.token_ids[1:, None], dtype=torch.int64)
                )[:, 0]
                policy = picked[torch.tensor(t.action_mask[1:])]
                advantage = (t.reward - rewards.mean()) / (spread + 1e-6) if spread > 0 else 0.0
                terms.append(
                    term_of(policy, torch.tensor(t.behavior_logprobs[t.action_mask]).double()) * advantage
                )
                count += len(policy)
        loss = -torch.cat(terms).sum() / count
        return loss.item(), torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
        )

    def sequence_tis(policy, behavior):
        weight = torch.exp((policy - behavior).sum().detach()).clamp(max=2.0)
        return weight * torch.exp(policy - policy.detach())

    loss, own = gradient(sequence_tis, lambda t: True)
    _, reference = gradient(
        lambda policy, behavior: torch.exp(policy - policy.detach()), lambda t: t.min_version == 3
    )
    [line] = report_of(done.run_dir)["sequence_tis"]
    assert (line["reference"], line["fresh"]) == ("fresh", 0.5)
    assert line["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert line["grad_norm"] == pytest.approx(own.norm().item(), rel=1e-4)
    assert line["cosine"] == pytest.approx(
        torch.nn.functional.cosine_similarity(own, reference, dim=0).item(), rel=1e-4
    )
    assert abs(line["cosine"]) < 0.99


def test_of_tokens_of_the_policy_itself_every_correction_has_the_on_policy_gradient(tmp_path):
    """mu = prox = pi and all of it fresh: nothing is rejected, every weight is 1, every cosine 1."""
    run = write_run(tmp_path, drift=0.0, lags=(0,), steps=1)
    done = play(run, tmp_path / "replay", report=True)
    for name, [line] in report_of(done.run_dir).items():
        assert line["kept"] == 1.0, name
        assert (line["ess"], line["weight_mean"], line["cosine"]) == pytest.approx(
            (1.0, 1.0, 1.0), abs=1e-5
        ), name


def test_without_fresh_trajectories_the_proximal_policy_stands_for_the_sampler(tmp_path):
    run = write_run(tmp_path, lags=(1, 2), steps=2)
    done = play(run, tmp_path / "replay", report=True, last_step=2)
    found = report_of(done.run_dir)
    assert [line["reference"] for line in found["none"]] == [
        "fresh",
        "proximal := policy",
    ]  # before version 1 nothing can be old
    assert found["none"][1]["cosine"] == pytest.approx(1.0, abs=1e-6)


def test_tokens_that_max_lag_leaves_out_count_as_lost(run, tmp_path):
    done = play(run, tmp_path / "replay", "algorithm.correction.max_lag=1", report=True, last_step=3)
    assert [line["kept"] < 1.0 for line in report_of(done.run_dir)["none"]] == [False, False, True]


def test_a_report_is_resumed_and_never_begun_in_the_middle(run, reported, tmp_path):
    play(run, tmp_path / "replay", report=True, last_step=2)
    again = play(run, tmp_path / "replay", report=True)
    assert report_of(again.run_dir) == report_of(reported.run_dir)
    play(run, tmp_path / "other", last_step=1)
    with pytest.raises(ConfigError, match="contains a replay up to step 1 without comparisons"):
        play(run, tmp_path / "other", report=True)


@pytest.mark.slow
def test_two_ranks_replay_and_report_the_same(run, whole, reported, tmp_path):
    done = play(run, tmp_path / "replay", "learner.world_size=2", report=True)
    for (step, one), (_, two) in zip(learned(whole.run_dir)[:1], learned(done.run_dir)[:1], strict=True):
        assert two["learner/loss"] == pytest.approx(one["learner/loss"], rel=1e-5, abs=1e-7), step
    alone = report_of(reported.run_dir)
    for name, [first, *_] in report_of(done.run_dir).items():
        for column in COLUMNS:  # no cosine where everything is rejected
            expected = alone[name][0][column]
            assert first[column] == (
                expected if expected is None else pytest.approx(expected, rel=1e-4, abs=1e-6)
            ), (name, column)
