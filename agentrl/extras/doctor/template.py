"""Check `template`: does the model's chat template only append?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl.chat.chat import Chat
from agentrl.chat.check import TemplateReport
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject

NUM_CONVERSATIONS = 100
CURE = "model.chat_template: a packaged template; `agentrl check-template MODEL` shows the conversations"


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Check the template on generated conversations, if the config's tokenizer is on this machine."""
    model = subject.config.model
    folder = model.tokenizer_path or model.path
    if not subject.is_given or not folder:
        return
    if not Path(folder).is_dir():
        text = f"{folder} is not on this machine, so its template was not checked"
        yield Diagnosis("template", "ok", text)
        return
    yield judge_template(Chat.of(model).report_template(num=NUM_CONVERSATIONS))


def judge_template(report: TemplateReport) -> Diagnosis:
    """Judge a report on a template."""
    text = f"{report.verdict} on {report.num} conversations"
    if report.verdict == "broken":
        findings = [finding.sentence for finding, _ in report.of_kind("broken")]
        return Diagnosis("template", "wrong", f"{text}: {findings[0] if findings else 'all refused'}", CURE)
    if report.verdict == "forks":
        return Diagnosis("template", "slow", f"{text}: {report.summary}", CURE)
    return Diagnosis("template", "ok", text)
