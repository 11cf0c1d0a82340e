"""Peer of smollm_step.py, run by the interpreter of TRL's environment: TRL's GRPO update on a given batch.

Reads {"model", "prompts": [text], "group_size", "lengths": [completion tokens], "micro", "steps"} from its
standard input. Completions are random tokens of these lengths instead of generated ones, so that only the
update is measured: what a step takes besides making and scoring completions. Prints one JSON object.
"""

import json
import os
import random
import resource
import sys
import tempfile
import time
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def main() -> None:
    given = json.load(sys.stdin)
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    total, steps = len(given["lengths"]), given["steps"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=given["micro"],
            gradient_accumulation_steps=total // given["micro"],
            num_generations=given["group_size"],
            max_completion_length=max(given["lengths"]),
            max_steps=steps,
            learning_rate=2e-5,
            beta=0.0,
            gradient_checkpointing=False,
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        prompts = [[{"role": "user", "content": text}] for text in given["prompts"]]
        trainer = GRPOTrainer(
            given["model"],
            reward_funcs=[lambda prompts, **_: [random.random() for _ in prompts]],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts * 64]),
            processing_class=AutoTokenizer.from_pretrained(given["model"], padding_side="left"),
        )
        spent = watched(trainer, given["lengths"])
        started, durations = time.process_time(), []

        class Steps(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                durations.append(time.process_time() - started)

        trainer.add_callback(Steps())
        trainer.train()
    # The first step allocates optimizer state.
    making = spent["making_s"]
    cpu_s = (durations[-1] - making[-1]) - (durations[0] - making[0])
    print(
        json.dumps(
            {
                "cpu_s": cpu_s / (steps - 1),
                "prompt_tokens": spent["prompt_tokens"] // steps,
                "completion_tokens": spent["completion_tokens"] // steps,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        ),
        flush=True,
    )


def watched(trainer: Any, lengths: list[int]) -> dict[str, Any]:
    """Replace what makes completions; count tokens, and sum up the CPU seconds spent there."""
    spent: dict[str, Any] = {"making_s": [], "prompt_tokens": 0, "completion_tokens": 0}
    generator, make = random.Random(0), trainer._generate_and_score_completions
    numbers = iter(lengths * 1000)

    def completions(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return [[generator.randrange(20, 260) for _ in range(next(numbers))] for _ in prompt_ids], None

    def making(*arguments: Any, **named: Any) -> Any:
        begun = time.process_time()
        made = make(*arguments, **named)
        before = spent["making_s"][-1] if spent["making_s"] else 0.0
        spent["making_s"].append(before + time.process_time() - begun)
        spent["prompt_tokens"] += int(made["prompt_mask"].sum())
        spent["completion_tokens"] += int(made["completion_mask"].sum())
        return made

    trainer._generate_single_turn = completions
    trainer._generate_and_score_completions = making
    return spent


if __name__ == "__main__":
    main()
