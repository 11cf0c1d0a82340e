"""Proximal log-probabilities that ranks store: what is read back is what the learner scored."""

import errno
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema import Config
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.proximal_files import ProximalRun, read_proximal, write_proximal
from agentrl.errors import DataError
from agentrl.learner import learner as learner_module
from agentrl.learner.packing import plan_microbatches
from agentrl.learner.sample_refs import SampleRef, loaded, planned
from parts.learner import learner_spec, lone_learner, tiny_sizes
from parts.trajectories import make_trajectory

VOCABULARY = 48
STEP = 7


def attempts_of(seed):
    """Return the facts of attempts of one to three segments, some of which share their first tokens."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(3):
        prompt = rng.integers(0, VOCABULARY, 6)
        for member in range(2):
            turns, starts, tokens = [], [], []
            for segment in range(int(rng.integers(1, 4))):
                starts.append(len(turns))
                num_actions = int(rng.integers(1, 6))
                turns += [-1] * 6 + [segment] * num_actions
                tokens += [*prompt, *rng.integers(0, VOCABULARY, num_actions)]
            trajectory = make_trajectory(
                turns,
                group_id=group,
                member=member,
                token_ids=np.array(tokens),
                behavior_logprobs=np.where(np.array(turns) >= 0, -1.0, 0.0),
                versions=np.where(np.array(turns) >= 0, 0, -1),
                segment_starts=tuple(starts),
            )
            found.append(AttemptFacts.of(trajectory))
    return found


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("max_tokens", [10, 1000])
def test_the_learner_s_own_log_probabilities_are_read_back(tmp_path: Path, max_tokens, shared_prefix):
    attempts = attempts_of(0)
    refs = [SampleRef.plain(index, attempt, advantage=1.0) for index, attempt in enumerate(attempts)]
    [plans] = plan_microbatches(
        [ref.shape for ref in refs], max_tokens=max_tokens, world_size=1, shared_prefix=shared_prefix
    )
    microbatches = planned(plans, refs)
    with lone_learner(learner_spec(sizes=tiny_sizes(VOCABULARY))) as one:
        scored = one.score(microbatches)
        assert one.store_proximal(microbatches, scored, str(tmp_path), STEP, 0) == {"unwritten_files": 0.0}
        # each attempt alone, whole
        for ref in refs:
            [[plan]] = plan_microbatches([ref.shape], max_tokens=1000, world_size=1)
            [alone] = one.own_logprobs(loaded(planned([plan], [ref])))
            attempt = ref.attempt
            num_actions = attempt.num_action_tokens
            stored = read_proximal(
                tmp_path, step=STEP, group=attempt.group_id, member=attempt.member, num_actions=num_actions
            )
            np.testing.assert_allclose(stored, alone, atol=1e-5)
    assert read_proximal(tmp_path, step=STEP, group=99, member=0, num_actions=3) is None
    assert read_proximal(tmp_path, step=STEP + 1, group=0, member=0, num_actions=3) is None


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 3), num_parts=st.integers(1, 2))
def test_runs_in_any_files_are_joined(tmp_path_factory, seed, num_ranks, num_parts):
    folder, rng = tmp_path_factory.mktemp("proximal"), np.random.default_rng(seed)
    whole = {
        (g, m): rng.normal(size=rng.integers(1, 20)).astype(np.float32) for g in range(3) for m in range(2)
    }
    files = {(part, rank): [] for part in range(num_parts) for rank in range(num_ranks)}
    for (group, member), logprobs in whole.items():
        cuts = sorted({0, len(logprobs), *rng.integers(0, len(logprobs) + 1, 2).tolist()})
        for start, end in itertools.pairwise(cuts):
            place = (int(rng.integers(num_parts)), int(rng.integers(num_ranks)))
            files[place].append(ProximalRun(group, member, start, logprobs[start:end]))
    for (part, rank), runs in files.items():
        write_proximal(folder, runs, step=STEP, part=part, rank=rank)
    for (group, member), logprobs in whole.items():
        found = read_proximal(folder, step=STEP, group=group, member=member, num_actions=len(logprobs))
        np.testing.assert_array_equal(found, logprobs)


def test_what_is_not_stored_is_not_a_number_and_a_damaged_file_is_named(tmp_path: Path):
    write_proximal(
        tmp_path, [ProximalRun(0, 0, 2, np.array([-1.0, -2.0], np.float32))], step=1, part=0, rank=0
    )
    found = read_proximal(tmp_path, step=1, group=0, member=0, num_actions=5)
    np.testing.assert_array_equal(found, [np.nan, np.nan, -1, -2, np.nan])
    (tmp_path / "step_000001_part0_rank1.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match=r"rank1\.parquet cannot be read"):
        read_proximal(tmp_path, step=1, group=0, member=0, num_actions=5)


def test_a_full_disk_is_counted_and_ends_nothing(tmp_path: Path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(learner_module, "write_proximal", full)
    refs = [SampleRef.plain(index, attempt) for index, attempt in enumerate(attempts_of(1))]
    [plans] = plan_microbatches([ref.shape for ref in refs], max_tokens=1000, world_size=1)
    with lone_learner(learner_spec(sizes=tiny_sizes(VOCABULARY))) as one:
        microbatches = planned(plans, refs)
        told = one.store_proximal(microbatches, one.score(microbatches), str(tmp_path), STEP, 0)
    assert told == {"unwritten_files": 1.0}
    assert "No space left" in caplog.text


@pytest.mark.parametrize("mode", ["bypass", "on_policy"])
def test_ratios_that_are_all_one_are_refused(mode):
    whole = {
        "algorithm": {"mode": mode},
        "buffer": {"max_staleness": 0},
        "tracking": {"token_ratios": True},
    }
    with pytest.raises(ValueError, match=rf"token_ratios=true needs algorithm.mode=decoupled \(is {mode}\)"):
        Config.model_validate(whole)
