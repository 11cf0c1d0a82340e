"""`agentrl check-template` prints a verdict."""

from pathlib import Path

from typer.testing import CliRunner

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.errors import ConfigError

TEMPLATES = Path(__file__).parents[2] / "chat" / "templates"


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role != 'HIDDEN' %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


# ----------------------------------------------------------------------------------------------- command line


def test_the_command_prints_the_verdict_and_its_exit_code_tells_broken(tmp_path):
    write_tiny_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "broken.jinja").write_text(CHATML.replace("HIDDEN", "user"))

    def run(*arguments: str):
        return CliRunner().invoke(
            app, ["check-template", str(tmp_path / "tokenizer"), "--num", "40", *arguments]
        )

    exact = run()
    assert exact.exit_code == 0
    assert exact.output.splitlines() == ["tool format: hermes", "verdict: exact (40 conversations)"]
    forks = run("--template", str(TEMPLATES / "thinking.jinja"), "--no-tools")
    assert forks.exit_code == 0
    assert "forks when a user speaks again: drops thinking" in forks.output
    (tmp_path / "plain.jinja").write_text(CHATML)
    plain = run("--template", str(tmp_path / "plain.jinja"))
    assert plain.exit_code == 0
    assert (
        "note: with tools: the chat template shows no tools; set model.chat_template=hermes" in plain.output
    )
    assert "with tools" not in run("--template", str(tmp_path / "plain.jinja"), "--no-tools").output
    for option in ("--tools", "--tool-format=hermes"):
        with_tools = run("--template", str(tmp_path / "plain.jinja"), option)
        assert isinstance(with_tools.exception, ConfigError)
        assert str(with_tools.exception).startswith("the chat template shows no tools")
    assert "verdict: exact" in run("--template", "smollm2", "--tools").output
    broken = run("--template", str(tmp_path / "broken.jinja"))
    assert broken.exit_code == 2
    assert "broken at the prompt: leaves out what a user says (40 of 40)" in broken.output
