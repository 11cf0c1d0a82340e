"""Writes the rows of the shop: wishes to train and validate on, and conversations for the warm start.

    python examples/shop_rows.py runs/shop/data

In most of the conversations the assistant says that it is done without having ordered. The policy comes out
of the warm start able to order, and rarely does.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from agentrl.plugins import environment_tools, load_plugins

WISHES = (("tea", 1), ("milk", 2))
STOCK = {"tea": 9, "milk": 9}
NUM_ROWS = {"train": 512, "val": 32}
NUM_CONVERSATIONS = 512
SHOP = str(Path(__file__).with_name("shop.py"))


def order_schema() -> dict[str, Any]:
    plugins = load_plugins([SHOP])
    return environment_tools(plugins.environment("shop"))["order"]().schema()


def row(rng: random.Random) -> dict[str, Any]:
    item, pieces = rng.choice(WISHES)
    return {
        "data_source": "shop",
        "prompt": [{"role": "user", "content": f"{pieces} {item}"}],
        "agent_name": "interaction_agent",
        "reward_model": {"ground_truth": {item: pieces}},
        "extra_info": {
            "environment_kwargs": {"name": "shop", "stock": STOCK},
            "interaction_kwargs": {"name": "customer", "wish": {item: pieces}},
        },
    }


def conversation(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation in which the assistant says that it is done, whether it ordered or not."""
    item, pieces = rng.choice(WISHES)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{pieces} {item}"}]
    for _ in range(2):
        orders = rng.random() < 0.4
        if orders:
            arguments = json.dumps({"item": item, "pieces": pieces})
            function = {"name": "order", "arguments": arguments}
            call = {"id": "call00000", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "ordered", "tool_call_id": "call00000", "name": "order"},
            ]
        messages.append({"role": "assistant", "content": "done"})
        if orders:
            break
        messages.append({"role": "user", "content": "wrong"})
    if messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages, "tools": [schema]}


def write(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in NUM_ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row(rng))}\n" for _ in range(number)))
    schema = order_schema()
    lines = (f"{json.dumps(conversation(rng, schema))}\n" for _ in range(NUM_CONVERSATIONS))
    (folder / "sft.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
