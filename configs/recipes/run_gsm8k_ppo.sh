#!/usr/bin/env bash
# PPO on GSM8K with Qwen2.5-0.5B-Instruct: one attempt per problem, and a critic of the same size as the policy.
# Two GPUs of 48 GB: one learns policy and critic, one serves.
#
#   GSM8K=grade_school_math/data configs/recipes/run_gsm8k_ppo.sh [KEY=VALUE]...
#
# GSM8K is the folder with train.jsonl and test.jsonl (github.com/openai/grade-school-math). Further arguments are overrides, such as
# critic.model.path=FOLDER or trainer.logger=[console,wandb].
set -euo pipefail
GSM8K=${GSM8K:?name the folder with train.jsonl and test.jsonl of GSM8K}
RUN=${RUN:-runs/gsm8k/ppo}

# Data: rows that are answered in one turn.
agentrl data gsm8k runs/data/gsm8k --in "$GSM8K" --agent single_turn_agent

# What the config amounts to: batch sizes, bound on lag, loss, warnings.
agentrl config explain recipes/gsm8k_ppo "$@"

# Training. An interrupted run goes on by the same command.
agentrl train recipes/gsm8k_ppo trainer.run_dir="$RUN" "$@"

# Evaluation of the trained policy: four sampled answers to each of the 1,319 test problems.
agentrl train recipes/gsm8k_ppo "$@" model.path="$RUN/policy" trainer.run_dir="$RUN/evaluation" trainer.val_only=true \
  eval.n=4 eval.temperature=1.0
