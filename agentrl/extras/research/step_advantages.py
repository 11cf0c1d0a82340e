"""Advantages of a stored step, computed again as the run's controller did; as a program, for `agentrl view`,
whose process has no torch.

```
python -m agentrl.extras.research.step_advantages RUN FILE     # JSON: advantages by row and token
```
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.compose import load_config
from agentrl.controller.credit import credit, group_attempts, whitened, with_reward
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.trajectories import read_trajectories
from agentrl.errors import AgentRLError, ConfigError, InfrastructureError
from agentrl.tracking.seals import check_text

TIMEOUT_S = 300.0


def step_advantages(run: Path, file: Path) -> list[list[float]]:
    """Return the advantages of each token of each row: 0 on context and in rows that were not trained on.

    Raises:
        ConfigError: the run's algorithm needs what is not stored: a critic's values, KL in the
            reward, or a teacher.
        DataError: the file is no file of trajectories.
        CheckpointError: the run's config was changed.
    """
    check_text(run / "config.yaml")
    config = load_config(str(run / "config.yaml"))
    if config.has_critic:
        raise ConfigError("advantages need the critic's values, which are not stored with trajectories")
    if config.algorithm.kl.place == "reward" and config.algorithm.kl.coefficient:
        raise ConfigError("advantages need the KL of each token, which is not stored with trajectories")
    if config.algorithm.distillation.is_used:
        raise ConfigError("advantages need the teacher's log-probabilities, which are not stored")
    trajectories, _ = read_trajectories(file)
    groups = with_reward(group_attempts([AttemptFacts.of(t) for t in trajectories]))
    groups = [group for group in groups if group.trajectories]
    samples = whitened(credit(groups, config.algorithm, group_size=config.rollout.fixed_group_size))
    masked = config.rollout.masked_outcomes
    known = {
        (ref.attempt.group_id, ref.attempt.member): ref.load().advantages
        for members in samples
        for ref in members
        if ref.attempt.outcome not in masked
    }
    return [
        [0.0] * t.num_tokens
        if t.is_greedy or (t.group_id, t.member) not in known
        else known[t.group_id, t.member].tolist()
        for t in trajectories
    ]


def compute_apart(run: Path, file: Path) -> Sequence[Sequence[float]]:
    """Return `step_advantages` from a process of its own.

    Raises:
        ConfigError: as there.
        InfrastructureError: the process failed or took longer than TIMEOUT_S.
    """
    command = [sys.executable, "-m", "agentrl.extras.research.step_advantages", str(run), str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"the advantages were not computed within {TIMEOUT_S:g} s") from error
    if done.returncode == ConfigError.exit_code:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        raise InfrastructureError(
            f"the advantages were not computed: {done.stderr.strip().splitlines()[-1:]}"
        )
    found: list[list[float]] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print the advantages as JSON."""
    try:
        sys.stdout.write(json.dumps(step_advantages(Path(sys.argv[1]), Path(sys.argv[2]))))
    except AgentRLError as error:
        sys.stderr.write(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
