"""The processes of a run beside the learner: servers, rollout actors, replay buffer, and the Ray cluster they
live on.
"""
