"""Detect models that cannot be trained, by the config.json at a path, or else by the path's name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTED_EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""`model_type` of mixtures of experts whose names, routing and updates are tested."""
EXPERTS = (
    "a mixture of experts of an architecture that is not tested; tested are Mixtral, OLMoE, Qwen2-MoE and "
    "Qwen3-MoE"
)
QUANTIZED = (
    "quantized; the learner publishes unquantized weights (model.dtype), and a server cannot load them into "
    "quantized weights"
)
SEEING = ("qwen2_5_vl",)
"""`model_type` of models whose images are supported (docs/models.md)."""
MULTIMODAL = (
    "a model for images, video or sound of an architecture that is not supported; supported is Qwen2.5-VL"
)

_NUM_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
)
_SEEING_BY_NAME = re.compile(r"(?<![a-z])qwen2\.5-vl(?![a-z])", re.IGNORECASE)
_TESTED_BY_NAME = re.compile(
    r"mixtral|olmoe|(?<![a-z])qwen(1\.5|2)-(moe|\d+b-a\d)|(?<![a-z])qwen3-(coder-)?\d+b-a\d", re.IGNORECASE
)
_OTHER_MODALITIES = ("vision_config", "audio_config", "visual", "vision_tower")
_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal configs contain the config of the language model."""
_BY_NAME: Mapping[str, re.Pattern[str]] = {
    EXPERTS: re.compile(
        r"\d+b-a\d+(\.\d+)?b|mixtral|(?<![a-z])moe(?![a-z])|deepseek-?(coder-)?v[2-9]|deepseek-?(r1|math-v2)(?!.*distill)|gpt-?oss|moonlight"
        r"|kimi-?k2|glm-?4\.[5-9]|longcat-?flash|qwen3-next|llama-?4|minimax-?m\d|dbrx|olmoe|phi-?3\.5-moe",
        re.IGNORECASE,
    ),
    QUANTIZED: re.compile(
        r"(?<![a-z])(fp8|int8|int4|w4a16|w8a8|awq|gptq|mxfp4|nvfp4)(?![a-z])", re.IGNORECASE
    ),
    MULTIMODAL: re.compile(
        r"(?<![a-z])vl(?![a-z])|vision|omni|internvl|minicpm-?[ov]|glm-?4(\.\d)?-?v|llava|pixtral|paligemma|smolvlm|bagel|qwen-?image",
        re.IGNORECASE,
    ),
}


def find_obstacles(path: str) -> list[str]:
    """Return the reasons why a model cannot be trained here; [] if there are none, or nothing is known.

    `path`: a local folder, whose config.json decides; else the name of a model on the hub.
    """
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        found = [what for what, pattern in _BY_NAME.items() if pattern.search(path)]
        tested = {EXPERTS: _TESTED_BY_NAME, MULTIMODAL: _SEEING_BY_NAME}
        return [what for what in found if what not in tested or not tested[what].search(path)]
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []  # the run itself reports a broken file at its start
    if not isinstance(description, Mapping):
        return []
    is_multimodal = description.get("model_type") not in SEEING and any(
        description.get(name) for name in _OTHER_MODALITIES
    )
    return [*find_refused(description), *([MULTIMODAL] if is_multimodal else [])]


def sees_images(folder: Path) -> bool:
    """Return whether the model in a folder is one whose images are supported, by its config.json."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever loads the model reports a broken file
    return isinstance(description, Mapping) and description.get("model_type") in SEEING


def find_refused(description: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a run would refuse this config.json at its start.

    Other modalities are not among them: some families list them in their config, but have a causal text-only
    model too.
    """
    is_untested = has_experts(description) and description.get("model_type") not in TESTED_EXPERTS
    is_quantized = any(part.get("quantization_config") for part in _parts(description))
    return [*([EXPERTS] if is_untested else []), *([QUANTIZED] if is_quantized else [])]


def has_experts(description: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a mixture of experts."""
    return any(_is_several(part.get(name)) for part in _parts(description) for name in _NUM_EXPERTS)


def _parts(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = (description.get(name) for name in _LANGUAGE_MODELS)
    return [description, *(part for part in inner if isinstance(part, Mapping))]


def _is_several(value: object) -> bool:
    return bool(value) if isinstance(value, list) else isinstance(value, int) and value > 1
