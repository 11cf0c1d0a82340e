"""Every file, symbol, command, option and `make` target that the documentation names exists; `docs_claims.py`
has the rules.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parts.docs_claims import LINK, SPAN, Page, anchors, complaints
from parts.docs_names import Project, read_project
from parts.rooms import PLUGINS, ROWS

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(
        str(file.relative_to(ROOT))
        for pattern in ("docs/*.md", "docs/results/*.md", "agentrl/extras/*/*.md")
        for file in sorted(ROOT.glob(pattern))
    ),
]
INDEX = "docs/README.md"
DIARY = "docs/roadmap.md"
"""It names what does not exist yet: only its links are checked."""

OTHERS = {
    "verl's": {
        "ToolAgentLoop",
        "default_compute_score",
        "mcp_servers_config_path",
        "tool_selected_list",
    },
    "SGLang's and its router's": {
        "--enable-lora",
        "--enable-memory-saver --enable-weights-cpu-backup",
        "flashinfer_trtllm",
        "sglang_router",
    },
    "Ray's, SLURM's and Kubernetes's": {
        "RAY_ADDRESS",
        "ray::DashboardAgent",
        "ray::RuntimeEnvAgent",
        "ray::ServerActor",
        "--num-cpus",
        "sbatch train.sbatch",
        "--requeue",
        "ReadWriteMany",
    },
    "huggingface_hub's": {"HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE"},
    "OpenTelemetry's": {
        "OTEL_EXPORTER_OTLP_CERTIFICATE",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TIMEOUT",
    },
    "a paper's": {"epsilon_high"},
    "a seat of a game": {"player_0"},
    "pytest's": {
        "tmp_path",
    },
    "the reader's": {"compute_score(data_source, solution_str, ground_truth, extra_info)"},
}
"""Names that pages may use although the project has no such thing, by whose they are."""
ALLOWED = frozenset().union(*OTHERS.values())


@pytest.fixture(scope="module")
def project() -> Project:
    return read_project()


def found_on(page: str, project: Project) -> list[tuple[str, str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return complaints(Page(page, text if page != DIARY else SPAN.sub("", text)), project)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str, project: Project) -> None:
    assert [f"{name}: {why}" for name, why in found_on(page, project) if name not in ALLOWED] == []


def test_every_exception_is_needed(project: Project) -> None:
    assert {name for page in PAGES for name, _ in found_on(page, project)} >= ALLOWED


def linked_from(page: str) -> set[str]:
    """The files that a page links, as paths from the root."""
    folder = (ROOT / page).parent
    targets = {target.partition("#")[0] for target in LINK.findall((ROOT / page).read_text())}
    files = [(folder / target).resolve() for target in targets if target and "://" not in target]
    return {str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)}


def test_every_page_is_in_the_index() -> None:
    """Those of results/ and the keys of verl are on a page that is."""
    linked = linked_from(INDEX) | linked_from("docs/results.md") | linked_from("docs/coming_from_verl.md")
    assert set(PAGES) - linked <= {INDEX, "README.md"}


def test_the_rows_of_imports_are_those_that_are_kept() -> None:
    (table,) = re.findall(
        r"## Who may import whom\n```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S
    )
    rows: dict[str, set[str]] = {}
    row = ""
    for line in table.splitlines():
        row = line[:2].strip() or row
        rows.setdefault(row, set()).update(re.findall(r"[a-z_]+", line[:52]))
    above = {"X": {"extras"}, "P": PLUGINS}
    assert rows == {**{str(i): names for i, names in enumerate(ROWS)}, **above}


GOOD = """
# A page
[itself](#a-page), [the loop](../agentrl/controller/train.py), [others](algorithms.md#policy-losses), [elsewhere](https://a.b/c)
`agentrl/types.py` `rollout/session.py` `tools/` `metrics.jsonl` `trajectories/step_000001.parquet` `path/to/file.py:function` `CONFIG.yaml`
`test_ledger.py::LedgerMachine` `configs/recipes/run_NAME.sh` `my_reward.py` `rollout/accuracy/<agent>` `time/update_critic_s`
`agentrl.chat.parsing.ToolFormat` `Trajectory.num_tokens` `session.generate()` `ToolResult(is_error=True)` `ReplayBuffer` `group_size`
`learn(roles, groups, config, ...)` `grpo` `(R_i - mean) / (std + 1e-6)` `max(-rho A, A)` `trainer.steps=20` `on_failure: tell` `--report`
`agentrl servers list\\|add\\|drain RUN` `agentrl play CONFIG.yaml --row N` `make test TEST_PROCESSES=0` `make lint type` `AGENTRL_DEBUG`
`x_18` `bash .ci/run` `aggregation: constant` `server=sglang_cpu` `clip_low clip_high` `verl.tools.base_tool` `attempt.answer`

```
.venv/bin/agentrl train configs/quickstart.yaml trainer.steps=20 algorithm=dapo   # a comment
make quickstart ARGS="trainer.steps=20"
OUT=x agentrl data gsm8k runs/data --in FOLDER
```

```mermaid
flowchart LR
    a["Ledger.lease<br/>ledger.py"] --> b["a rollout actor"]
```

```python
from agentrl.plugins import Session, tool


def greet(): ...
```
`greet()` `greet`

| verl | agentrl |
|---|---|
| `DataProto.union`, `ray_trainer.py` | `Trajectory` |
"""  # noqa: E501


def test_what_exists_is_not_complained_about(project: Project) -> None:
    assert complaints(Page("docs/page.md", GOOD), project) == []


@pytest.mark.parametrize(
    "line",
    [
        "[there](missing.md)",
        "[there](algorithms.md#no-such-heading)",
        "[here](#nowhere)",
        "`agentrl/controller/loop.py`",
        "`docs/missing.md`",
        "`rollout/sessions.py`",
        "`agentrl/nothing/`",
        "`metrics.yaml`",
        "`rollout/acuracy`",
        "`test_ledger.py::LedgerMachines`",
        "`test_no_such_law_holds`",
        "`agentrl.chat.parsing.ToolFormats`",
        "`agentrl.no_module`",
        "`Trajectory.num_token`",
        "`RunResults`",
        "`session.generates()`",
        "`packs(samples)`",
        "`pack(samples, max_token=64)`",
        "`learn(learner, groups, config)`",
        "`group_sizes`",
        "`group_sizes: 8`",
        "`AGENTRL_TRACES`",
        "`trajectory_files/`",
        "`aggregation: constants`",
        "`clip_low clip_hihg`",
        "`--reports`",
        "`agentrl trains CONFIG.yaml`",
        "`agentrl servers list\\|remove RUN`",
        "`agentrl play CONFIG.yaml --rows 3`",
        "`agentrl train CONFIG.yaml trainer.stepps=3`",
        "`make tests`",
        "`make test TEST_PROCESS=0`",
        "```\nagentrl train configs/missing.yaml\n```",
        "```\n.venv/bin/agentrl play CONFIG.yaml \\\n  --rows 3\n```",
        "```python\nfrom agentrl.plugins import Tools\n```",
        "```python\nclass Ledgers:\n```",
        "```python\nclass Ledgers; class Curriculum: draw(self)\n```",
        "```python\nclass Ledger:\n    def leases(self, owner) -> int\n```",
        "```python\nclass Ledger:\n    def lease(self, owner, who) -> int; def drop(self, owner, group_id, "
        "reason)\n```",
        "```python\ndef pack(samples, *, max_tokens, world_size, max_rows)                # "
        "learner/packing.py\n```",
        "```python\ndef pack(samples, *, max_tokens, world_size)                # learner/packer.py\n```",
        "```python\nclass Ledger:\n    def lease(self) -> int\n```",
        "```python\ndef pack(\n    samples, *, max_tokens, world_size,\n    max_rows=None,\n)\n```",
        "```mermaid\nflowchart LR\n  a[Ledger.leases] --> b\n```",
        "```mermaid\nflowchart LR\n  a[ledgers.py] --> b\n```",
        "| agentrl | verl |\n|---|---|\n| `Trajectories` | `DataProto` |",
    ],
)
def test_what_does_not_exist_is_found(line: str, project: Project) -> None:
    assert len(complaints(Page("docs/architecture.md", line), project)) == 1


def test_anchors_are_those_of_github() -> None:
    assert anchors("# A `b_c`, d: e!\n## [Link](x.md) twice\n## Link twice\n```\n# no heading\n```\n") == {
        "a-b_c-d-e",
        "link-twice",
        "link-twice-1",
    }
