"""Check `sandbox`: the walls around programs that a model writes."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.reward import RewardConfig
from agentrl.config.schema import Config
from agentrl.errors import SandboxError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.extras.sandbox import WALLS, Protections, Sandbox, SandboxOptions

TOOL, REWARD = "python", "code"
CURE = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces), or give "
    "the container CAP_SYS_ADMIN (agentrl/extras/sandbox/README.md)"
)


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Run the sandbox's self-test, in which a program tries what none may do."""
    try:
        protections = Sandbox(SandboxOptions(allow_unprotected=WALLS)).check()
    except SandboxError as error:
        is_used = not subject.is_given or runs_programs(subject.config)
        yield Diagnosis("sandbox", "wrong" if is_used else "slow", str(error), CURE)
        return
    is_needed = not subject.is_given or runs_programs(subject.config)
    yield judge_walls(protections, is_needed=is_needed, allowed=allowed_walls(subject.config))


def judge_walls(protections: Protections, *, is_needed: bool, allowed: frozenset[str]) -> Diagnosis:
    """Judge the walls that held.

    Args:
        is_needed: the run executes programs of the model, or nothing is known of the run.
        allowed: walls that the config allows to be missing.
    """
    missing = {wall: why for wall, why in protections.missing.items() if wall not in allowed}
    if missing:
        gaps = "; ".join(f"{wall} ({why})" for wall, why in missing.items())
        note = "" if is_needed else "; this config runs no programs, but a row may name the tool"
        return Diagnosis("sandbox", "wrong" if is_needed else "slow", f"not protected: {gaps}{note}", CURE)
    if protections.missing:
        text = f"not protected, as allow_unprotected allows: {', '.join(protections.missing)}"
        return Diagnosis("sandbox", "slow", text, CURE)
    return Diagnosis(
        "sandbox", "ok", f"all {len(WALLS)} walls held, by {', '.join(protections.layers) or 'nothing'}"
    )


def runs_programs(config: Config) -> bool:
    """Return whether the config names the Python tool or the code reward."""
    return TOOL in _tools(config) or REWARD in _rewards(config)


def allowed_walls(config: Config) -> frozenset[str]:
    """Return the walls that the Python tool and the code reward may lack, each of them that is named."""
    parts = []
    if TOOL in _tools(config):
        parts.append(config.agent.tool_config.get(TOOL, {}))
    if REWARD in _rewards(config):
        parts.append(config.reward.reward_config.get(REWARD, {}))
    lists = [frozenset(part.get("allow_unprotected", ())) for part in parts]
    return frozenset.intersection(*lists) if lists else frozenset()


def _tools(config: Config) -> frozenset[str]:
    return frozenset({*config.agent.tools, *config.agent.tool_config, *(config.eval.tools or ())})


def _rewards(config: Config) -> frozenset[str]:
    terms = {term.reward or name for name, term in config.reward.terms.items()}
    # The defaults name a reward for every known data source, whether the run has it or not.
    sources = dict(config.reward.sources.items() - RewardConfig().sources.items())
    return frozenset({*terms, *sources.values(), *config.reward.reward_config})
