#!/usr/bin/env bash
# On-policy distillation on GSM8K: Qwen2.5-0.5B-Instruct learns from Qwen2.5-3B-Instruct, one attempt per problem and no rewards.
# Two GPUs of 24 GB, one that learns (policy and teacher) and one that serves. Other models: `size=...`, see configs/size.
#
#   GSM8K=grade_school_math/data configs/recipes/run_gsm8k_distill.sh [KEY=VALUE]...
#
# GSM8K is the folder with train.jsonl and test.jsonl (github.com/openai/grade-school-math). Further arguments are overrides, such as
# size=7b or trainer.logger=[console,wandb].
set -euo pipefail
GSM8K=${GSM8K:?name the folder with train.jsonl and test.jsonl of GSM8K}
RUN=${RUN:-runs/gsm8k/distill}

# Data: rows that are answered in one turn.
agentrl data gsm8k runs/data/gsm8k --in "$GSM8K" --agent single_turn_agent

# What the config amounts to: batch sizes, bound on lag, loss, warnings.
agentrl config explain recipes/gsm8k_distill "$@"

# Training. An interrupted run goes on by the same command.
agentrl train recipes/gsm8k_distill trainer.run_dir="$RUN" "$@"

# Evaluation of the trained policy: four sampled answers to each of the 1,319 test problems.
agentrl train recipes/gsm8k_distill "$@" model.path="$RUN/policy" trainer.run_dir="$RUN/evaluation" trainer.val_only=true \
  eval.n=4 eval.temperature=1.0

# The newest checkpoint as a folder that transformers and SGLang load ($RUN/policy holds the same at the end of a run).
CHECKPOINT=$(find "$RUN/checkpoints" -maxdepth 1 -name 'step_*' | sort | tail -n 1)
agentrl export "$CHECKPOINT" "$RUN/export"
