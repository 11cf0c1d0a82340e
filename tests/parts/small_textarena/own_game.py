"""A module of a user's that registers a game."""

from textarena import Climb
from textarena.envs.registration import ENV_REGISTRY

ENV_REGISTRY["Own-v0"] = Climb
