# `make` lists the targets. Each sets up what it needs, so `make demo` is all that a new clone takes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Pinned: pip then takes a CPU build where the index has one; a range may pull gigabytes of CUDA.
TORCH  := torch==2.13.0
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-slow test-slurm test-gpu lint format docs bench bench-small \
	bench-decode bench-predictors bench-ablation bench-approximations bench-lanes \
	bench-formats bench-models clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

setup: $(STAMP) ## create .venv and install moebatch with its development tools

demo: $(STAMP) ## answer 200 prompts with the built-in model and mark the answers
	$(BIN)/moebatch run jobs/demo.yaml
	$(BIN)/python -m demo mark jobs/demo.jsonl jobs/demo.answers.jsonl

# Each test process begins with neighbouring tests, which share checkpoints and what is computed
# from them. Of matrices, such as schedule by family by policy, it runs as many cases as have every
# schedule, every family and every policy.
test: $(STAMP) ## run the tests in a few minutes: some cases of every matrix
	$(PYTEST)

test-all: $(STAMP) ## run all cases of all matrices, and new examples of every property
	$(PYTEST) -m 'not slow and not gpu and not slurm'

test-slow: $(STAMP) ## run the tests that take minutes or gigabytes
	$(BIN)/python -m pytest -m slow

# The test starts a Slurm of one node, as root, and waits most of the time.
test-slurm: $(STAMP) ## run the tests on a real Slurm; they say loudly if it cannot be started
	$(BIN)/python -m pytest -m slurm tests/slurm

test-gpu: $(STAMP) ## run the tests that need a CUDA device and a torch built for it
	$(BIN)/python -m pytest -m gpu -rs -s

lint: $(STAMP) ## check format, style, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## format the code and repair what ruff can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## put today's output into the console blocks of README.md and docs/
	$(BIN)/python -m tests.docs

# ARGS are those of the benchmark: make bench ARGS='--small --only few-rows', ARGS=--help.
bench: $(STAMP) ## measure jobs on a checkpoint of 6 GB beside prediction, bound and peers
	$(BIN)/python -m tests.benchmarks.jobs $(ARGS)

bench-small: $(STAMP) ## measure a smaller set of jobs in five minutes
	$(BIN)/python -m tests.benchmarks.jobs --small $(ARGS)

bench-decode: $(STAMP) ## measure steady decoding, and prompts that ride along
	$(BIN)/python -m tests.benchmarks.decode $(ARGS)

bench-predictors: $(STAMP) ## measure each predictor of experts by layer, on an emulated GPU
	$(BIN)/python -m tests.benchmarks.predictors $(ARGS)

bench-ablation: $(STAMP) ## measure the steps that lead to ProMoE, on an emulated GPU
	$(BIN)/python -m tests.benchmarks.ablation $(ARGS)

bench-approximations: $(STAMP) ## measure adaptive gating and pre-gates, on an emulated GPU
	$(BIN)/python -m tests.benchmarks.approximations $(ARGS)

bench-models: $(STAMP) ## print what plans say of every model shape on three machines
	$(BIN)/python -m tests.benchmarks.models $(ARGS)

bench-lanes: $(STAMP) ## measure how busy lanes are, beside what was predicted, on an emulated GPU
	$(BIN)/python -m tests.benchmarks.lanes $(ARGS)

bench-formats: $(STAMP) ## run the same job with experts in every format of weights
	$(BIN)/python -m tests.benchmarks.formats $(ARGS)

clean: ## remove .venv
	rm -rf $(VENV)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) --editable '.[dev]'
	touch $@
