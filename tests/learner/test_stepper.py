"""One optimizer step by hand: what moves the weights, what skips an update, what is told and kept of it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.batch import Sample, ScoredMicrobatch
from agentrl.learner.correction import Corrector
from agentrl.learner.loss_part import LossPart
from agentrl.learner.packing import pack
from agentrl.learner.ranks import join_ranks, leave_ranks
from agentrl.learner.routing import Routing
from agentrl.learner.step import Stepper, count_update
from parts.learner import reserved_port

LR = 0.1


@pytest.fixture(scope="module")
def place():
    yield join_ranks(LearnerConfig(), rank=0, address="127.0.0.1", port=reserved_port())
    leave_ranks()


class Point(torch.nn.Module):
    """Two weights; the loss of an item is their product with numbers that a test chooses."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def part(self, gradient, *, added=0.0, **maxima):
        loss = (self.weights * torch.tensor(gradient, dtype=torch.float64)).sum() + added
        found = {name: torch.tensor(value) for name, value in maxima.items()}
        return LossPart(loss, {"loss": loss, "entropy": torch.tensor(6.0)}, found)


class Bench:
    """A stepper of a Point, and the weights as they were whenever they were about to change."""

    def __init__(self, place, dump_folder=None, **options):
        self.point, self.before = Point(), []
        config = OptimizerConfig(
            **{"lr": LR, "weight_decay": 0.0, "grad_clip": None, "eps": 1e-12, **options}
        )
        self.stepper = Stepper(
            SimpleNamespace(module=self.point, routing=Routing()),
            place,
            config,
            total_updates=10,
            dump_folder=dump_folder,
            before_change=lambda: self.before.append(self.values),
            is_offloaded=False,
        )

    @property
    def values(self):
        return self.point.weights.tolist()

    def run(self, *parts, items=None, **counted):
        items = microbatches() * len(parts) if items is None else items
        counts = count_update(microbatches())
        counts = type(counts)(**{**vars_of(counts), **counted})
        return self.stepper.run(items, parts.__getitem__, counts)


def vars_of(counts):
    return {name: getattr(counts, name) for name in ("loss_tokens", "sequences", "action_tokens")}


def microbatches():
    """Return one of an attempt of three actions, of which two are in the loss, and an attempt of one."""
    samples = []
    for index, (mask, loss_mask) in enumerate([([0, 1, 1, 1], [0, 1, 0, 1]), ([0, 1], [0, 1])]):
        zeros = np.zeros(len(mask), np.float32)
        samples.append(
            Sample(
                index,
                np.arange(len(mask), dtype=np.int32),
                np.array(mask, bool),
                np.array(loss_mask, bool),
                zeros,
                zeros,
            )
        )
    [found] = pack(samples, max_tokens=100, world_size=1)
    return found


def test_what_an_update_counts(place):
    assert vars_of(count_update(microbatches() * 2)) == {"loss_tokens": 6, "sequences": 4, "action_tokens": 8}


def test_gradients_of_all_items_add_up_and_are_told(place):
    """The first step of Adam is the rate times the sign of the gradient: here of (3, -4)."""
    bench = Bench(place)
    point = bench.point
    metrics = bench.run(point.part([1.0, 4.0], ratio_max=1.5), point.part([2.0, -8.0], ratio_max=1.25))
    assert bench.values == pytest.approx([1.0 - LR, 2.0 + LR])
    assert metrics == pytest.approx(
        {
            "loss": (1 + 8) + (2 - 16),
            "entropy": 12.0 / 3,
            "ratio_max": 1.5,
            "grad_norm": 5.0,
            "lr": LR,
            "num_tokens": 3.0,
            "num_sequences": 2.0,
            "is_skipped": 0.0,
            "non_finite_updates": 0.0,
        }
    )
    assert bench.before == [[1.0, 2.0]]
    assert bench.point.weights.grad is None, "its memory is free until the next update"
    again = bench.run(point.part([0.0, 2.0], ratio_max=1.0), point.part([0.0, 0.0], ratio_max=7.0))
    assert (again["grad_norm"], again["ratio_max"]) == (2.0, 7.0)
    assert len(bench.before) == 2


@pytest.mark.parametrize(("grad_clip", "applied"), [(None, 100.0), (200.0, 100.0), (1.0, 1.0)])
def test_a_gradient_beyond_the_limit_is_scaled_and_its_norm_is_told(place, grad_clip, applied):
    """Adam's second moment after an update is 0.1 of the squared gradient that it was given."""
    bench = Bench(place, grad_clip=grad_clip, betas=(0.9, 0.9))
    metrics = bench.run(bench.point.part([60.0, 80.0]))
    assert metrics["grad_norm"] == pytest.approx(100.0)
    [state] = bench.stepper.optimizer.state.values()
    assert float((state["exp_avg_sq"].sum() / 0.1).sqrt()) == pytest.approx(applied, rel=1e-5)


def test_the_rate_is_that_of_the_schedule_and_each_update_advances_it_once(place):
    """A warm-up of four updates; the second has nothing to learn, the third is not finite."""
    bench = Bench(place, warmup_updates=4)
    told, moved = [], []
    for update in range(4):
        before = bench.values[0]
        part = bench.point.part([1.0, 0.0], added=math.inf if update == 2 else 0.0)
        told.append(bench.run(part, loss_tokens=0 if update == 1 else 1)["lr"])
        moved.append(before - bench.values[0])
        assert bench.stepper.num_updates == update + 1
    assert told == pytest.approx([LR / 4, LR / 2, LR * 3 / 4, LR])
    assert moved == pytest.approx([LR / 4, 0.0, 0.0, LR])
    assert len(bench.before) == 2


def test_an_update_without_loss_tokens_computes_nothing_and_is_told(place):
    bench = Bench(place)
    found = bench.run(items=microbatches(), loss_tokens=0)
    assert found == {
        "lr": LR,
        "num_tokens": 0.0,
        "num_sequences": 2.0,
        "is_skipped": 1.0,
        "non_finite_updates": 0.0,
    }
    assert (bench.values, bench.before) == ([1.0, 2.0], [])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_changes_no_weight(place, kind):
    bench = Bench(place)

    def bad():
        if kind == "loss":
            return bench.point.part([1.0, 1.0], added=math.nan, ratio_max=2.0)
        root = (bench.point.weights * 0.0).sum().sqrt()  # 0, with an infinite slope
        return LossPart(root, {"loss": root, "entropy": torch.tensor(6.0)}, {"ratio_max": torch.tensor(2.0)})

    for number in (1, 2):
        metrics = bench.run(bench.point.part([1.0, 0.0], ratio_max=1.0), bad())
        assert (metrics["is_skipped"], metrics["non_finite_updates"]) == (1.0, float(number))
        assert all(math.isfinite(value) for value in metrics.values()), "no NaN is told"
        assert metrics["ratio_max"] == 2.0
    assert (bench.values, bench.before, bench.stepper.num_non_finite) == ([1.0, 2.0], [], 2)
    assert bench.run(loss_tokens=0)["non_finite_updates"] == 2.0
    after = bench.run(bench.point.part([3.0, 4.0]))
    assert (after["grad_norm"], after["is_skipped"]) == (5.0, 0.0), "nothing of the bad gradient is left"


def test_the_items_of_an_update_that_is_not_finite_are_kept(place, tmp_path):
    folder = tmp_path / "runs" / "bad"
    bench = Bench(place, dump_folder=str(folder))
    bench.run(bench.point.part([1.0, 1.0]))
    assert not folder.exists()
    [plain] = microbatches()
    scores = np.full(plain.num_action_tokens, -0.5)
    [correction] = Corrector(AlgorithmConfig()).correct([plain], [scores])
    items = [ScoredMicrobatch(plain, scores, scores - 1, correction), plain]
    for _ in range(2):
        bench.run(bench.point.part([1.0, 1.0], added=math.nan), bench.point.part([1.0, 1.0]), items=items)
    names = ["update000001_rank0.safetensors", "update000002_rank0.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    kept = load_file(folder / names[0])
    np.testing.assert_array_equal(kept["0.targets"], plain.targets)
    np.testing.assert_array_equal(kept["1.loss_mask"], plain.loss_mask)
    np.testing.assert_array_equal(kept["0.proximal_logprobs"], scores)
    np.testing.assert_array_equal(kept["0.ref_logprobs"], scores - 1)
    np.testing.assert_array_equal(kept["0.accepted"], correction.accepted)
    np.testing.assert_array_equal(kept["0.weights"], correction.weights)
    assert not {"0.values", "1.values", "1.proximal_logprobs", "1.accepted", "1.weights"} & set(kept)


def test_without_a_folder_nothing_is_kept(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench = Bench(place)
    assert bench.run(bench.point.part([1.0, 1.0], added=math.nan))["is_skipped"] == 1.0
    assert list(tmp_path.iterdir()) == []


def test_a_rank_on_a_cpu_watches_its_memory_from_the_first_update_on(place):
    bench = Bench(place)
    assert bench.stepper._gaps._usual_pages is None
    bench.run(bench.point.part([1.0, 1.0]))
    assert bench.stepper._gaps._usual_pages is not None
