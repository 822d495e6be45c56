# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Pinned: pip then takes a CPU build where one is at hand; a range may pull gigabytes of CUDA.
TORCH  := torch==2.13.0
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test test-all test-slurm test-slow test-gpu bench bench-small bench-decode \
	bench-predictors bench-ablation bench-approximations lint format setup clean

demo: $(STAMP)
	$(BIN)/moebatch run jobs/demo.yaml
	$(BIN)/python -m moebatch.demo mark jobs/demo.jsonl jobs/demo.answers.jsonl

# Each test process begins with neighbouring tests, which share checkpoints and what is worked out
# of them. Of matrices, such as schedule by family by policy, it runs as many cases as have every
# schedule, every family and every policy.
test: $(STAMP)
	$(PYTEST)

# All cases of all matrices, properties with new examples each time.
test-all: $(STAMP)
	$(PYTEST) -m 'not slow and not gpu and not slurm'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# On a Slurm of one node that is started on the spot, as root; says so loudly where it cannot be had.
# Waits most of the time.
test-slurm: $(STAMP)
	$(BIN)/python -m pytest -m slurm tests/slurm

# Needs a CUDA device and a torch build for it; says so of every test that it skips.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -rs -s

# A fixed set of jobs on a checkpoint of 6 GB that is made once: measured, predicted, bound, peers.
# ARGS are those of the benchmark: make bench ARGS='--small --only few-rows', ARGS=--help.
bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks.jobs $(ARGS)

bench-small: $(STAMP)
	$(BIN)/python -m tests.benchmarks.jobs --small $(ARGS)

# Steady decoding, and prompts riding on it.
bench-decode: $(STAMP)
	$(BIN)/python -m tests.benchmarks.decode $(ARGS)

# What each predictor of experts is worth, by layer; ProMoE's ablation. On an emulated GPU.
bench-predictors: $(STAMP)
	$(BIN)/python -m tests.benchmarks.predictors $(ARGS)

bench-ablation: $(STAMP)
	$(BIN)/python -m tests.benchmarks.ablation $(ARGS)

# What adaptive gating and pre-gates buy, the same way.
bench-approximations: $(STAMP)
	$(BIN)/python -m tests.benchmarks.approximations $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
