#!/usr/bin/env bash
# DAPO with responses of up to 16,384 tokens on Qwen2.5-7B-Instruct, validated on AIME 2024 and 2025.
# Eight GPUs of 80 GB: four learn, four serve.
#
#   DAPO_MATH=dapo-math-17k.parquet AIME=aime configs/recipes/run_aime_dapo.sh [KEY=VALUE]...
#
# DAPO_MATH is the file of the data set BytedTsinghua-SIA/DAPO-Math-17k, whose rows are read as they are. AIME is a folder with
# aime_2024.jsonl and aime_2025.jsonl, one {"problem": ..., "answer": ...} per line. Further arguments are overrides, such as size=3b, or
# agent.max_response_tokens=8192 learner.microbatch_tokens=9216 for half the activations.
set -euo pipefail
DAPO_MATH=${DAPO_MATH:?name the file dapo-math-17k.parquet}
AIME=${AIME:?name the folder with aime_2024.jsonl and aime_2025.jsonl}
RUN=${RUN:-runs/aime/dapo}

# Data: the training file is used as it is; AIME becomes rows that ask for the answer in a box.
agentrl data aime runs/data/aime --in "$AIME"

# What the config amounts to: batch sizes, bound on lag, loss, warnings.
agentrl config explain recipes/aime_dapo "$@"

# Training. An interrupted run goes on by the same command.
agentrl train recipes/aime_dapo data.train_files="[$DAPO_MATH]" trainer.run_dir="$RUN" "$@"

# Evaluation of the trained policy: the mean over 32 attempts at each problem.
agentrl train recipes/aime_dapo data.train_files="[$DAPO_MATH]" "$@" model.path="$RUN/policy" trainer.run_dir="$RUN/evaluation" \
  trainer.val_only=true eval.n=32
