#!/usr/bin/env bash
# GRPO on GSM8K with a LoRA adapter on Qwen2.5-7B-Instruct.
# Two GPUs of 80 GB: one learns (15 GB of frozen weights, and the adapter), one serves.
#
#   GSM8K=grade_school_math/data configs/recipes/run_gsm8k_grpo_lora.sh [KEY=VALUE]...
#
# GSM8K is the folder with train.jsonl and test.jsonl (github.com/openai/grade-school-math). Further arguments are overrides, such as
# model.lora.rank=64 or trainer.logger=[console,wandb].
set -euo pipefail
GSM8K=${GSM8K:?name the folder with train.jsonl and test.jsonl of GSM8K}
RUN=${RUN:-runs/gsm8k/grpo_lora}

# Data: rows that are answered in one turn.
agentrl data gsm8k runs/data/gsm8k --in "$GSM8K" --agent single_turn_agent

# What the config amounts to: batch sizes, bound on lag, loss, warnings.
agentrl config explain recipes/gsm8k_grpo_lora "$@"

# Training. An interrupted run goes on by the same command.
agentrl train recipes/gsm8k_grpo_lora trainer.run_dir="$RUN" "$@"

# Evaluation of the trained policy: the adapter is merged into $RUN/policy; four sampled answers to each test problem.
agentrl train recipes/gsm8k_grpo_lora "$@" model.path="$RUN/policy" trainer.run_dir="$RUN/evaluation" trainer.val_only=true \
  eval.n=4 eval.temperature=1.0

# The adapter alone, in peft's format.
CHECKPOINT=$(find "$RUN/checkpoints" -maxdepth 1 -name 'step_*' | sort | tail -n 1)
agentrl export "$CHECKPOINT" "$RUN/adapter" --adapter
