"""`agentrl new` writes plugins whose tests pass; `agentrl plugins` lists them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.errors import PluginError
from agentrl.extras.testing.listing import format_plugins, list_plugins
from agentrl.extras.testing.scaffold import KINDS, write_plugin
from agentrl.plugins import load_plugins

run = CliRunner().invoke


def test_all_kinds_pass_their_tests(tmp_path: Path) -> None:
    for kind in KINDS:
        result = run(app, ["new", kind, f"my_{kind}", "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert f"pytest {tmp_path}/test_my_{kind}.py\n" in result.output
        assert "pip install pytest" in result.output
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    for command in (["check", "--select", "E,F,W,I,UP,B,RUF"], ["format", "--check"]):
        linted = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "140", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_is_a_page_and_its_yaml_is_a_config(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = write_plugin(kind, "blue_bird", Path("plugins"))
    assert len(written.file.read_text().splitlines()) <= 45
    named = written.yaml.partition("# and in the rows")[0]
    (tmp_path / "config.yaml").write_text(named)
    assert yaml.safe_load(named)
    config = load_config("config.yaml")
    plugins = load_plugins(config.agent.plugins)
    found = {
        "tool": lambda: plugins.tools.own_name(config.agent.tools[0]),
        "interaction": lambda: plugins.interactions.own_name("blue_bird"),
        "environment": lambda: plugins.environments.own_name(str(config.agent.environment)),
        "agent": lambda: plugins.agents.own_name(config.agent.default),
        "reward": lambda: plugins.rewards.own_name(config.reward.sources["my_data_source"]),
    }
    assert found[kind]() == "blue_bird"


@pytest.mark.parametrize("name", ["Blue", "blue-bird", "1bird", "", "class", "a/b"])
def test_names_that_python_would_refuse(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="cannot be the name of a plugin"):
        write_plugin("tool", name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_bird.py").write_text("mine")
    with pytest.raises(PluginError, match="already exists"):
        write_plugin("tool", "bird", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_bird.py"]


def test_the_list_names_sources_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_plugin("tool", "bird", tmp_path)
    write_plugin("environment", "nest", tmp_path)
    (tmp_path / "config.yaml").write_text("agent: {tools: ['bird.py:bird'], environment: 'nest.py:Nest'}\n")
    text = run(app, ["plugins", "config.yaml"]).output
    assert f"bird                 {tmp_path}/bird.py" in text
    assert "text: string, times?: integer" in text
    assert "nest.open_box        " in text  # a method of the environment
    assert [line for line in text.splitlines() if line.endswith("s") and not line.startswith(" ")] == [
        f"{kind}s" for kind in KINDS
    ]
    listed = json.loads(run(app, ["plugins", "config.yaml", "--json"]).output)
    assert next(info for info in listed if info["name"] == "bird")["parameters"]["required"] == ["text"]


def test_a_plugin_that_does_not_load_is_listed_with_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = load_plugins()

    def get(name: str) -> type:
        raise PluginError(f"tool {name!r} cannot be imported")

    monkeypatch.setattr(plugins.tools, "get", get)
    infos = list_plugins(plugins)
    assert {info.problem for info in infos if info.kind == "tool"} == {
        f"tool {name!r} cannot be imported" for name in plugins.tools.names()
    }
    assert "DOES NOT LOAD: tool 'calculator' cannot be imported" in format_plugins(infos)
