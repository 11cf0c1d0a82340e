#!/usr/bin/env bash
# A tool agent on GSM8K with Qwen2.5-3B-Instruct: calls of a calculator over up to six turns, then the answer.
# Four GPUs of 80 GB: two learn, two serve.
#
#   GSM8K=grade_school_math/data configs/recipes/run_gsm8k_tools.sh [KEY=VALUE]...
#
# GSM8K is the folder with train.jsonl and test.jsonl (github.com/openai/grade-school-math). Further arguments are overrides, such as
# agent.tools=[python] or trainer.logger=[console,wandb].
set -euo pipefail
GSM8K=${GSM8K:?name the folder with train.jsonl and test.jsonl of GSM8K}
RUN=${RUN:-runs/gsm8k/tools}

# Data: rows whose tools_kwargs name the calculator, and whose prompt asks to use it.
agentrl data gsm8k runs/data/gsm8k_tools --in "$GSM8K" --agent tool_agent

# What the config amounts to: batch sizes, bound on lag, loss, warnings.
agentrl config explain recipes/gsm8k_tools "$@"

# Training. An interrupted run goes on by the same command.
agentrl train recipes/gsm8k_tools trainer.run_dir="$RUN" "$@"

# Evaluation of the trained policy: four sampled conversations for each test problem; val/tool_use tells how many called the tool.
agentrl train recipes/gsm8k_tools "$@" model.path="$RUN/policy" trainer.run_dir="$RUN/evaluation" trainer.val_only=true \
  eval.n=4 eval.temperature=1.0
