"""Jobs without rollouts: imitation, reward models, replay, comparison of corrections, export, audit."""
