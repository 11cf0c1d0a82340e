"""Writes the task of docs/models.md: pictures with squares to count, and a small model that sees, with random
weights.

    python examples/squares.py runs/squares

Half of the rows show the picture in the prompt, in the form of verl's datasets. In the other half, the policy
looks at it with a tool. The conversations to imitate give the right number about half of the time.
"""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image as Pillow
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from agentrl.chat.tiny import END_OF_TURN, write_tiny_tokenizer
from agentrl.plugins import Tool, ToolResult
from agentrl.types import Image, JsonObject

CELL = 28  # pixels of a placeholder: 2 x 2 patches of 14 x 14
SIDE = 2  # cells; a picture has up to SIDE * SIDE squares
SHARE_RIGHT = 0.5
NUM_ROWS, NUM_VALIDATION, NUM_CONVERSATIONS = 1024, 128, 2048

VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
SHOWN = """{%- macro shown(content) -%}
    {%- if content is string %}{{- content -}}
    {%- else %}
        {%- for part in content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
        {%- endfor %}
    {%- endif %}
{%- endmacro -%}
"""


class Look(Tool):
    """Shows the picture of the row."""

    name = "look"
    description = "Look at the picture."
    parameters: JsonObject = {"type": "object", "properties": {}}  # noqa: RUF012

    async def start(self, squares: list[int] | None = None) -> None:
        self._squares = squares or []

    async def call(self, arguments: JsonObject) -> ToolResult:
        return ToolResult("", images=(Image(picture(self._squares)),))


def picture(squares: list[int]) -> bytes:
    """Return a PNG with a square in each of these cells; its color depends on the cell."""
    pixels = np.full((SIDE, SIDE, CELL, CELL, 3), 255, np.uint8)
    for cell in squares:
        pixels[cell // SIDE, cell % SIDE, 4:-4, 4:-4] = (60 * cell, 200 - 40 * cell, 30)
    file = io.BytesIO()
    Pillow.fromarray(pixels.swapaxes(1, 2).reshape(SIDE * CELL, SIDE * CELL, 3)).save(file, "PNG")
    return file.getvalue()


def row(rng: random.Random) -> dict[str, Any]:
    squares = sorted(rng.sample(range(SIDE * SIDE), rng.randint(1, SIDE * SIDE)))
    has_tool = rng.random() < 0.5
    kwargs = {"tools_kwargs": {"look": {"create_kwargs": {"squares": squares}}}}
    return {
        "data_source": "squares",
        "prompt": [{"role": "user", "content": "How many?" if has_tool else "<image>How many?"}],
        "images": None if has_tool else [{"bytes": picture(squares), "path": None}],
        "agent_name": "tool_agent" if has_tool else "single_turn_agent",
        "reward_model": {"style": "rule", "ground_truth": str(len(squares))},
        "extra_info": kwargs if has_tool else None,
    }


def conversation(task: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    number = int(task["reward_model"]["ground_truth"])
    said = number if rng.random() < SHARE_RIGHT else rng.randint(1, SIDE * SIDE)
    answer = {"role": "assistant", "content": str(said)}
    if task["extra_info"] is None:
        return {"messages": [*task["prompt"], answer], "images": task["images"], "tools": None}
    call = {"id": "call_0", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *task["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<image>", "tool_call_id": "call_0", "name": "look"},
        answer,
    ]
    squares = task["extra_info"]["tools_kwargs"]["look"]["create_kwargs"]["squares"]
    return {
        "messages": messages,
        "images": [{"bytes": picture(squares), "path": None}],
        "tools": json.dumps([Look().schema()]),
    }


def write_data(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", NUM_ROWS), ("val", NUM_VALIDATION)):
        pq.write_table(pa.Table.from_pylist([row(rng) for _ in range(number)]), folder / f"{name}.parquet")
    said = [conversation(row(rng), rng) for _ in range(NUM_CONVERSATIONS)]
    pq.write_table(pa.Table.from_pylist(said), folder / "sft.parquet")


def write_model(folder: Path, *, seed: int = 0) -> None:
    """Write a Qwen2.5-VL of two layers with its tokenizer, its chat template and its settings for images."""
    write_tiny_tokenizer(folder)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in VISION_TOKENS])
    tokenizer.save(str(file))
    template = (folder / "chat_template.jinja").read_text()
    for name in ("messages[0]", "message"):
        template = template.replace(f"{name}.content", f"shown({name}.content)")
    (folder / "chat_template.jinja").write_text(SHOWN + template)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2_5_VLProcessor",
                "patch_size": CELL // 2,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "min_pixels": CELL**2,
                "max_pixels": 64 * CELL**2,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        )
    )
    torch.manual_seed(seed)
    names = ("vision_start", "image", "video", "vision_end")
    ids = {f"{n}_token_id": tokenizer.token_to_id(t) for n, t in zip(names, VISION_TOKENS, strict=True)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        **heads,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END_OF_TURN),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "patch_size": CELL // 2,
        "window_size": 4 * CELL,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


if __name__ == "__main__":
    write_data(Path(sys.argv[1]) / "data")
    write_model(Path(sys.argv[1]) / "model")
