"""The fixtures of tests of the loop itself."""

from parts.rollout_stage import chat as chat
from parts.rollout_stage import stage as stage
