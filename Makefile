# Everything below works from a fresh clone: each target first builds the environment it needs in .venv.
# Needed on the machine: python3 (3.10 or newer, with venv and pip), make, gcc, git.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# pip's progress as one short line for each package; from the first error on, everything.
BRIEF  := 2>&1 | sed -un -e '/^ *ERROR/,$$p' -e 's/^Collecting \([^ ]*\).*/   getting \1/p' \
                       -e 's/^Installing collected packages.*/   installing/p'
WORKERS ?= 2

SHELL := bash
.SHELLFLAGS := -o pipefail -c

# A machine with an NVIDIA GPU takes pip's default torch; any other takes the release pinned for the CPU.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := -c constraints.txt $(if $(HAS_GPU),,-c constraints-cpu.txt)

# One thread per test process: the workers already fill the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help demo test check lint types test-slow test-gpu test-peers format clean
help:
	@echo "make demo        install and run the demonstration (under 3 minutes once installed)"
	@echo "make test        install, lint, check types, run the tests, print the coverage"
	@echo "make test-slow   the long property tests and sweeps"
	@echo "make test-gpu    the tests that need an NVIDIA GPU"
	@echo "make test-peers  kernels of other packages on the virtual GPU"
	@echo "make format      apply the formatter and the fixable lint rules"
	@echo "make clean       remove the environment and the caches"

$(BIN)/python:
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt constraints-cpu.txt | $(BIN)/python
	@echo "== installing coflash and what the demo needs into $(VENV) (the first time takes a few minutes)"
	@$(PIP) $(CONSTRAINTS) -e '.[demo]' $(BRIEF)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt constraints-cpu.txt | $(BIN)/python
	@echo "== installing coflash and what the tests need into $(VENV) (the first time takes a few minutes)"
	@$(PIP) $(CONSTRAINTS) -e '.[dev]' $(BRIEF)
	@touch $@ $(VENV)/.demo

# The peers pin other releases of what is here already, so they come without their dependencies.
$(VENV)/.peers: $(VENV)/.dev
	@echo "== installing the peers into $(VENV)"
	@$(PIP) --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 torch-c-dlpack-ext einops $(BRIEF)
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/coflash demo

test: check $(VENV)/.peers
	@echo "== tests"
	@$(PYTEST) -n $(WORKERS) --dist loadgroup --durations=15 --cov --cov-report=term

check: lint types

lint: $(VENV)/.dev
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev
	@echo "== types"
	@$(BIN)/mypy

test-slow: $(VENV)/.dev
	@$(PYTEST) -n $(WORKERS) --dist loadgroup --durations=15 -m "slow and not gpu and not peers"

test-gpu: $(VENV)/.dev
	@$(PYTEST) --durations=15 -m "gpu and not peers"

test-peers: $(VENV)/.peers
	@$(PYTEST) -n $(WORKERS) --dist loadgroup --durations=15 -m "peers and not gpu"

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
