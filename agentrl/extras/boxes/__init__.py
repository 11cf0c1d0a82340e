"""Boxes: isolated places with files and commands, one per attempt (agentrl/extras/boxes/README.md)."""

from agentrl.extras.boxes.box import BoxEnded, BoxFileMissing, BoxMaker, BoxRefused, Executed, OpenBox, Start

__all__ = ["BoxEnded", "BoxFileMissing", "BoxMaker", "BoxRefused", "Executed", "OpenBox", "Start"]
