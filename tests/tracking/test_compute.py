"""What is said about the speed and memory of updates, from metrics that are there."""

import io

from rich.console import Console

from agentrl.tracking.compute import compute_text, typical_compute_text
from agentrl.tracking.console import step_line
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.panel import PanelState, draw_panel
from agentrl.tracking.progress import Progress

ON_GPUS = {
    "learner/update_tokens_per_s": 64_000.0,
    "learner/update_tokens_per_gpu_s": 8_000.0,
    "learner/update_flops_per_s": 3.2e15,
    "learner/update_flops_per_s_per_rank": 4e14,
    "learner/update_mfu": 0.4044,
    "learner/memory/update_gpu_bytes_max": 61.5 * 2**30,
    "learner/memory/rss_bytes_max": 3.0 * 2**30,
    "learner/memory/update_predicted_bytes_max": 64.0 * 2**30,
}
TEXT = (
    "64,000 tokens/s (8,000 per GPU)   3.2 PFLOP/s (400.0 TFLOP/s per rank)   MFU 40.4%   "
    "peak 61.5 GiB (predicted 64.0)"
)


def record(step, values):
    return StepRecord("train", step, step, 10.0 * step, values)


def test_updates_on_gpus_are_told():
    assert compute_text(ON_GPUS) == TEXT


def test_on_one_cpu_rank_there_is_no_share_of_a_peak():
    values = {
        "learner/update_tokens_per_s": 93.0,
        "learner/update_flops_per_s": 7.5e10,
        "learner/update_flops_per_s_per_rank": 7.5e10,
        "learner/memory/rss_bytes_max": 4.0 * 2**30,
    }
    assert compute_text(values) == "93 tokens/s   75.0 GFLOP/s   peak 4.0 GiB"
    assert "MFU" not in step_line(record(1, values), Progress(None))
    assert compute_text({}) == ""


def test_the_line_of_a_step_has_the_share_where_it_is_known():
    assert "  MFU 0.40  took" in step_line(record(1, ON_GPUS), Progress(None))


def test_the_panel_shows_what_the_last_step_computed():
    state = PanelState("run", None)
    state.add(record(1, ON_GPUS))
    console = Console(file=io.StringIO(), width=200)
    console.print(draw_panel(state, since_log_s=0.0))
    assert TEXT in console.file.getvalue()


def test_a_report_has_the_medians_of_the_steps():
    slow, fast = ({**ON_GPUS, "learner/update_mfu": share} for share in (0.1, 0.9))
    steps = [record(1, slow), record(2, ON_GPUS), record(3, fast), StepRecord("validation", 3, 3, 31.0, slow)]
    assert typical_compute_text(steps) == TEXT
    assert typical_compute_text([]) == ""
