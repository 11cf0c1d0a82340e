"""Credit per token, computed where the tokens are: the same numbers as one formula over the batch in memory,
however the batch is cut.
"""

import itertools
import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.advantages.reinforce import Moments
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.controller.credit import credit, whitened
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.token_columns import StoredNumbers, TokenColumn, column_folder, keep
from agentrl.errors import DiskError
from agentrl.learner.packing import plan_microbatches
from agentrl.learner.sample_refs import (
    SampleRef,
    assessments,
    columns_by_sample,
    planned,
    sums_by_sample,
)
from agentrl.learner.token_credit import end_place
from agentrl.types import ConversationRecord, Group, Outcome, RewardEvent
from parts.columns import assessment_of
from parts.credit_in_memory import credit_in_memory
from parts.trajectories import make_trajectory

seeds = st.integers(0, 2**31)


def attempt(rng, *, group, member, has_conversations):
    """Return an attempt of one to four segments, which may have grown alternately, with rewards on turns."""
    num_segments = int(rng.integers(1, 5))
    numbers = iter(rng.permutation(20))
    turns, starts, owners = [], [], []
    names = ["main", *rng.choice(["planner", "worker"], 2)]
    for _ in range(num_segments):
        starts.append(len(turns))
        owners.append(int(rng.integers(0, len(names))))
        turns += [-1] * int(rng.integers(1, 4))
        for _ in range(int(rng.integers(0, 3))):
            turns += [int(next(numbers))] * int(rng.integers(1, 70 if rng.random() < 0.1 else 4))
            turns += [-1] * int(rng.integers(0, 2))
    actions = np.flatnonzero(np.array(turns) >= 0)
    rewards = tuple(
        RewardEvent("r", float(rng.choice([0.5, 1.0, -0.25])), int(rng.choice(actions)))
        for _ in range(int(rng.integers(0, 4)) if len(actions) else 0)
    )
    conversations = (
        {
            "conversations": tuple(ConversationRecord(name, ()) for name in names),
            "segment_conversations": tuple(owners),
        }
        if has_conversations
        else {}
    )
    return make_trajectory(
        turns,
        group_id=group,
        member=member,
        rewards=rewards,
        segment_starts=tuple(starts),
        outcome=Outcome.TRUNCATED if rng.random() < 0.3 else Outcome.COMPLETED,
        **conversations,
    )


def batch(rng, *, has_conversations):
    return [
        [attempt(rng, group=g, member=m, has_conversations=has_conversations) for m in range(3)]
        for g in range(3)
    ]


def columns_of(rng, played):
    return [rng.normal(size=t.num_action_tokens).astype(np.float32) for t in played]


@settings(max_examples=120, deadline=None)
@given(
    seed=seeds,
    advantage=st.sampled_from(["gae", "gae_turn", "reinforce_plus_plus", "grpo", "rloo", "turn_group"]),
    gamma=st.sampled_from([1.0, 0.9]),
    whiten=st.booleans(),
    has_kl=st.booleans(),
    teacher=st.sampled_from([None, 0.0, 0.7]),
    conversation_credit=st.sampled_from(["attempt", "own"]),
    segment_credit=st.sampled_from(["all", "last"]),
    bootstraps=st.booleans(),
    num_ranks=st.integers(1, 4),
)
def test_credit_of_the_ranks_is_credit_in_memory(
    seed,
    advantage,
    gamma,
    whiten,
    has_kl,
    teacher,
    conversation_credit,
    segment_credit,
    bootstraps,
    num_ranks,
):
    rng = np.random.default_rng(seed)
    groups = batch(rng, has_conversations=conversation_credit == "own")
    played = [t for members in groups for t in members]
    has_critic = advantage.startswith("gae")
    bootstraps = bootstraps and has_critic and conversation_credit == "attempt"
    distillation = DistillationConfig()
    if teacher is not None:
        distillation = DistillationConfig(teacher="t", coefficient=0.5, gamma=teacher)
    algorithm = AlgorithmConfig(
        advantage=advantage,
        gamma=gamma,
        lam=0.8,
        whiten=whiten,
        conversation_credit=conversation_credit,
        segment_credit=segment_credit,
        bootstrap_truncated=bootstraps,
        distillation=distillation,
    )
    known = [Group(g, tuple(AttemptFacts.of(t) for t in members)) for g, members in enumerate(groups)]
    values, kl, taught = (columns_of(rng, played) for _ in range(3))
    behind = [
        float(np.float32(rng.normal()))
        if bootstraps and t.outcome is Outcome.TRUNCATED and t.num_action_tokens
        else 0.0
        for t in played
    ]
    with_ends = [
        np.insert(own, end_place(AttemptFacts.of(t))[1], np.float32(end)) if end else own
        for own, t, end in zip(values, played, behind, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        assessment = assessment_of(
            known,
            values=with_ends if has_critic else None,
            kl=kl if has_kl else None,
            kl_coefficient=0.1,
            teacher_kl=taught if teacher is not None else None,
            folder=folder,
        )
        refs = credit(known, algorithm, group_size=3, assessment=assessment)

        def measured_by_ranks(samples):
            return [sample.moments() for rank in range(num_ranks) for sample in samples[rank::num_ranks]]

        one, several = (
            [ref for members in found for ref in members]
            for found in (whitened(refs), whitened(refs, measured_by_ranks))
        )
        samples = [ref.load() for ref in one]
        for ref, sample in zip(several, samples, strict=True):
            assert ref.load().advantages.tobytes() == sample.advantages.tobytes(), "whatever rank has it"
    advantages, returns = credit_in_memory(
        played,
        algorithm,
        values=values if has_critic else None,
        ends=behind if bootstraps else None,
        kl=kl if has_kl else None,
        kl_coefficient=0.1,
        teacher_kl=taught if teacher is not None else None,
    )
    for index, (t, sample) in enumerate(zip(played, samples, strict=True)):
        mask = t.action_mask
        np.testing.assert_allclose(sample.advantages[mask], advantages[index], rtol=2e-7, atol=2e-7)
        assert not sample.advantages[~mask].any()
        assert (sample.values is not None) == (sample.returns is not None) == has_critic
        if has_critic:
            np.testing.assert_array_equal(sample.values[mask], values[index])
            np.testing.assert_allclose(sample.returns[mask], returns[index], rtol=2e-7, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    max_tokens=st.integers(3, 60),
    num_ranks=st.integers(1, 3),
    is_shared=st.booleans(),
    is_stored=st.booleans(),
)
def test_numbers_per_microbatch_come_back_to_the_tokens_that_they_are_about(
    seed, max_tokens, num_ranks, is_shared, is_stored
):
    """Also those behind the end of an attempt that was cut off; and their sums over turns."""
    rng = np.random.default_rng(seed)
    played = [t for members in batch(rng, has_conversations=False) for t in members]
    refs = []
    for index, t in enumerate(played):
        ref = SampleRef.plain(index, AttemptFacts.of(t))
        refs.append(ref.replace(has_end=not is_shared and index % 2 == 0 and t.num_action_tokens > 0))
    wanted = [rng.normal(size=sum(n for _, n in ref.shape.segments)).astype(np.float32) for ref in refs]
    options = {"max_tokens": max_tokens, "world_size": num_ranks, "shared_prefix": is_shared}
    plans = plan_microbatches([ref.shape for ref in refs], **options)
    microbatches = planned([plan for shard in plans for plan in shard], refs)
    columns = [
        np.concatenate(
            [np.empty(0, np.float32)]
            + [wanted[p.sample][p.first_place : p.first_place + p.num_actions] for p in m.plan.pieces]
        )
        for m in microbatches
    ]
    with tempfile.TemporaryDirectory() as folder:
        summed = None if any(ref.has_end for ref in refs) else microbatches
        found = assessments(columns, folder if is_stored else None, summed_for=summed)
        for column, own in zip(columns_by_sample(refs, microbatches, found), wanted, strict=True):
            assert column.load().tobytes() == own.tobytes()
    if summed is not None:
        for ref, sums, own in zip(refs, sums_by_sample(refs, microbatches, found), wanted, strict=True):
            bounds = np.cumsum([0, *(n for _, n in ref.attempt.turns)])
            expected = [own[a:b].sum(dtype=np.float64) for a, b in itertools.pairwise(bounds)]
            np.testing.assert_allclose(sums, expected, rtol=1e-12, atol=1e-12)
    assert sum(one.num_bad for one in found) == 0


def test_numbers_that_are_not_finite_are_counted_where_they_are():
    found = assessments([np.array([1.0, np.nan, np.inf]), np.array([0.0])], None)
    assert [one.num_bad for one in found] == [2, 0]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    seed=seeds,
)
def test_moments_are_those_of_all_numbers_however_they_are_cut(values, cuts, seed):
    numbers = np.array(values)
    parts = [Moments.of(torch.from_numpy(part)) for part in np.split(numbers, sorted(cuts))]
    joined, whole = Moments.joined(parts), Moments.of(torch.from_numpy(numbers))
    assert joined.count == whole.count == len(values)
    for name in ("mean", "squares", "low", "high"):
        assert getattr(joined, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-9)
    order = np.random.default_rng(seed).permutation(len(parts))
    assert Moments.joined([parts[place] for place in order]) == joined, "bit for bit, in any order"


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=40))
def test_two_whitenings_are_one(values):
    numbers = torch.tensor(values, dtype=torch.float64)
    first = Moments.of(numbers)
    once = first.whitening.of(numbers)
    twice = Moments.of(once).whitening.of(once)
    second = first.whitened(first.whitening).whitening
    torch.testing.assert_close(first.whitening.then(second).of(numbers), twice, rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------------- files


def test_a_column_whose_file_is_gone_or_short_is_told(tmp_path):
    [numbers] = keep([np.arange(4.0)], str(tmp_path))
    assert isinstance(numbers, StoredNumbers)
    column = TokenColumn(4, ((0, numbers),))
    assert column.load().tolist() == [0, 1, 2, 3]
    with pytest.raises(DiskError, match=r"ends before the numbers per token that it should contain"):
        replace(numbers, count=5).load()
    (tmp_path / numbers.path).unlink()
    with pytest.raises(DiskError, match=r"numbers per token in .* cannot be read"):
        column.load()
    with pytest.raises(DiskError, match=r"numbers per token cannot be written to .*; free space there"):
        keep([np.arange(4.0)], str(tmp_path / "absent"))


def test_columns_live_as_long_as_the_step(tmp_path):
    left = tmp_path / "columns" / "left.f32"
    left.parent.mkdir()
    left.write_bytes(b"of a step that a crash interrupted")
    with column_folder(tmp_path / "columns") as folder:
        assert not left.exists()
        keep([np.zeros(3)], folder)
    assert not (tmp_path / "columns").exists()
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DiskError, match=r"columns cannot be created"),
        column_folder(tmp_path / "file/columns"),
    ):
        pass
