"""lm_eval's side of beside_lm_eval.py, run by the Python of an environment with lm_eval: plays one task.

The model is a server that speaks SGLang's protocol. lm_eval's own `sglang-generate` sends stop texts, which
the embedded server refuses, so requests are made here: transformers renders and tokenizes the prompt, the
server gets and returns token ids, and the text is cut before the first stop text.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

TIMEOUT_S = 3600.0


class ServedModel(LM):
    """A model behind /generate. `generations` has the tokens of each request, by document."""

    def __init__(self, url: str, folder: Path, *, in_flight: int) -> None:
        super().__init__()
        self._url = url
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._in_flight = in_flight
        self.generations: dict[int, dict[str, Any]] = {}

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.name_or_path)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return str(self._tokenizer.chat_template)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        with ThreadPoolExecutor(self._in_flight) as pool:
            return list(pool.map(self._generate, requests))

    def _generate(self, request: Instance) -> str:
        context, options = request.args
        ids = self._tokenizer(context, add_special_tokens=False)["input_ids"]
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": options["max_gen_toks"], "temperature": 0.0},
            "return_logprob": True,
        }
        sent = urllib.request.Request(
            f"{self._url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(sent, timeout=TIMEOUT_S) as reply:
            answer = json.load(reply)
        text = self._tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
        for stop in options["until"]:
            text = text.partition(stop)[0]
        assert request.doc_id is not None
        self.generations[request.doc_id] = {
            "prompt_ids": ids,
            "ids": answer["output_ids"],
            "logprobs": [each[0] for each in answer["meta_info"]["output_token_logprobs"]],
            "text": text,
        }
        return text

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("the embedded server has no log-probabilities of a prompt")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError("the embedded server has no log-probabilities of a prompt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=Path, help="YAML")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = ServedModel(args.url, args.model, in_flight=args.in_flight)
    name = f"agentrl_{args.task.stem}"
    results = simple_evaluate(
        model,
        tasks=[name],
        task_manager=TaskManager(include_path=str(args.task.parent), include_defaults=False),
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    rows = {doc: {**generation, "read": {}} for doc, generation in model.generations.items()}
    for sample in results["samples"][name]:
        rows[sample["doc_id"]]["read"][sample["filter"]] = {
            "answer": sample["filtered_resps"][0],
            "is_right": bool(sample["exact_match"]),
        }
    figures = {key: value for key, value in results["results"][name].items() if key.startswith("exact_match")}
    found = {"lm_eval": version("lm_eval"), "results": figures, "rows": [rows[doc] for doc in sorted(rows)]}
    args.out.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
