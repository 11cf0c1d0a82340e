#!/usr/bin/env bash
# An interaction on GSM8K with Qwen2.5-1.5B-Instruct: a partner says when the answer is wrong; two more tries at most.
# Two GPUs of 48 GB, one that learns and one that serves.
#
#   GSM8K=grade_school_math/data configs/recipes/run_gsm8k_feedback.sh [KEY=VALUE]...
#
# GSM8K is the folder with train.jsonl and test.jsonl (github.com/openai/grade-school-math). Further arguments are overrides, such as
# algorithm.gamma=0.8 or trainer.logger=[console,wandb].
set -euo pipefail
GSM8K=${GSM8K:?name the folder with train.jsonl and test.jsonl of GSM8K}
RUN=${RUN:-runs/gsm8k/feedback}

# Data: rows with interaction_kwargs: who replies, and the right number.
agentrl data gsm8k runs/data/gsm8k_feedback --in "$GSM8K" --agent interaction_agent

# What the config amounts to: batch sizes, bound on lag, loss, warnings.
agentrl config explain recipes/gsm8k_feedback "$@"

# Training. An interrupted run goes on by the same command.
agentrl train recipes/gsm8k_feedback trainer.run_dir="$RUN" "$@"

# Evaluation of the trained policy: four sampled conversations for each test problem.
agentrl train recipes/gsm8k_feedback "$@" model.path="$RUN/policy" trainer.run_dir="$RUN/evaluation" trainer.val_only=true \
  eval.n=4 eval.temperature=1.0
