# Each target says what it is for in the comment behind it; `make` alone prints them.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUICKSTART := runs/quickstart
SMOLLM := runs/smollm
SMOLLM_START = $(SMOLLM)/warm_start$(if $(filter smollm_hard,$(CONFIG)),_hard)
PYTEST := $(BIN)/python -m pytest
ARGS ?=
CONFIG ?= smollm
TEST_PROCESSES ?= 3
SLOW_TEST_PROCESSES ?= 2
BENCH ?= sync_vs_async in_flight rollout_overhead advantages learner_step logprob_memory learner_memory

# Each test process starts many others that import the same modules: their bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm test test-extras test-slow test-sglang test-gpu lint type bench soak docs templates mutants clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install everything into it

# torch goes first and alone, so that pip takes the build meant for this machine; the rest follows the tested versions. Last come
# packages that tests read files of and never import: without what they depend on.
$(STAMP): pyproject.toml constraints.txt tests/chat/templates/packages.txt
	@echo "setup: creating $(VENV) and installing (a few minutes the first time)"
	@test -x $(BIN)/python || { \
		for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
			if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
		done; \
		test -n "$$found" || { echo "setup: needs Python 3.11 or newer; name one: make setup PYTHON=/path/to/python" >&2; exit 2; }; \
		$$found -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/chat/templates/packages.txt
	@touch $@
	@echo "setup: done"

quickstart: $(QUICKSTART)/warm_start/.done ## train a small policy to use a calculator, from nothing (ARGS="trainer.steps=20" overrides)
	@echo "quickstart: training asynchronously (agentrl train configs/quickstart.yaml $(ARGS))"
	@$(BIN)/agentrl train configs/quickstart.yaml $(ARGS)

# `.done` is written last: an interrupted command starts over instead of leaving half a dataset or half a policy.
$(QUICKSTART)/warm_start/.done: configs/quickstart_sft.yaml $(QUICKSTART)/data/.done | setup
	@echo "quickstart: no policy yet; making one by imitation, about a minute (agentrl sft configs/quickstart_sft.yaml)"
	@$(BIN)/agentrl sft configs/quickstart_sft.yaml
	@touch $@

$(QUICKSTART)/data/.done: | setup
	@echo "quickstart: writing sums to imitate, train and validate on (agentrl data arithmetic $(@D))"
	@$(BIN)/agentrl data arithmetic $(@D)
	@touch $@

smollm: $(SMOLLM_START)/.done ## teach a real pretrained model the same (CONFIG=smollm_lora: an adapter; smollm_hard: slower, all kinds)
	@echo "smollm: training asynchronously (agentrl train configs/$(CONFIG).yaml $(ARGS))"
	@$(BIN)/agentrl train configs/$(CONFIG).yaml $(ARGS)

$(SMOLLM)/warm_start/.done: configs/smollm_sft.yaml $(SMOLLM)/data/.done $(SMOLLM)/model/config.json | setup
	@echo "smollm: no policy yet; making one by imitation, some minutes (agentrl sft configs/smollm_sft.yaml)"
	@$(BIN)/agentrl sft configs/smollm_sft.yaml
	@touch $@

$(SMOLLM)/warm_start_hard/.done: configs/smollm_hard_sft.yaml $(SMOLLM)/all_kinds/.done $(SMOLLM)/model/config.json | setup
	@echo "smollm: no policy yet; making one by imitation, some minutes (agentrl sft configs/smollm_hard_sft.yaml)"
	@$(BIN)/agentrl sft configs/smollm_hard_sft.yaml
	@touch $@

$(SMOLLM)/data/.done: | setup
	@$(BIN)/agentrl data arithmetic $(@D) --kinds tool,interaction --tool-use 0.35
	@touch $@

$(SMOLLM)/all_kinds/.done: | setup
	@$(BIN)/agentrl data arithmetic $(@D) --tool-use 0.35
	@touch $@

$(SMOLLM)/model/config.json: | setup
	@echo "smollm: fetching SmolLM2-135M-Instruct, 93 MB (agentrl models fetch smollm2 $(@D))"
	@$(BIN)/agentrl models fetch smollm2 $(@D)

# Much of the time goes into waiting for servers and for Ray to start: three processes keep two cores busy. A file's tests stay together,
# for they share what it started; the files keep their order, in which the long ones are not the last.
# The core's tests are those that need no extra; what concerns all files of the repository (pages, imports, seams) is among the others.
OTHERS = tests/repository tests/seams tests/docs tests/learner/test_one_process.py tests/extras
QUICK_TESTS = $(PYTEST) -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow and not sglang and not gpu"

test: setup ## run the core's tests that need no GPU, no network and no patience (TEST_PROCESSES=0: in one process, as --pdb needs)
	$(QUICK_TESTS) $(addprefix --ignore ,$(OTHERS)) $(ARGS)

test-extras: setup ## run those of the extras, in agentrl/extras, and those of the repository as a whole
	$(QUICK_TESTS) -o testpaths="$(OTHERS)" $(ARGS)

# Each of them trains for minutes, most of the time on one core. Those on a real SGLang belong to `test-sglang`.
test-slow: setup ## run the tests that take minutes
	$(PYTEST) -n $(SLOW_TEST_PROCESSES) --dist worksteal -m "slow and not sglang" $(ARGS)

test-sglang: setup ## run the tests that need a real SGLang server, on a CPU (the first time: builds an environment for it, 1.5 GB)
	@$(BIN)/python tests/sglang_cpu/environment.py >/dev/null
	$(PYTEST) -m sglang $(ARGS)

# On a bare machine without a network: benchmarks/gpu/README.md.
test-gpu: setup ## run the checks that need a GPU (AGENTRL_GPU_DEVICE=cpu: the same in small on a CPU)
	$(PYTEST) -m gpu tests/gpu $(ARGS)

lint: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## check types
	$(BIN)/mypy

bench: setup ## measure synchronous against asynchronous training, and the agent loop, the advantages and the learner beside their peers (BENCH=rollout_overhead: one of them)
	for name in $(BENCH); do $(BIN)/python benchmarks/$$name.py --out runs/bench/$$name.json $(ARGS) || exit 1; done

soak: setup ## play 1,000 attempts at once for half an hour, with failures, and look for leaks (ARGS="--minutes 5 --warm-up 2" overrides)
	$(BIN)/python benchmarks/soak.py --out runs/bench/soak.json $(ARGS)

docs: setup ## write docs/config.md from the schema, and the tables of verl's keys
	$(BIN)/python -m agentrl.extras.plan.config_reference
	$(BIN)/python -m agentrl.extras.verl.importing.docs

templates: setup ## write the table of chat templates in docs/templates.md
	$(BIN)/python tests/chat/templates/trl_templates.py

mutants: setup ## change one thing at a time in the code that decides what is trained, and see which changes no test notices (ARGS="--sample 300 --seed 0")
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) *.egg-info build .pytest_cache .mypy_cache .ruff_cache .hypothesis
