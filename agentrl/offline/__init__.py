"""Jobs without rollouts: imitation, reward models, replay, corrections, export, audit, import of models."""
