# Everything runs from a clone with Python, a C++ compiler and make: each target sets up .venv on first use.
#
#   make train              train a small Mixtral on four processes (tp 2 x ep 4) and compare it with one process
#   make test               lint and tests/unit
#   make test-full          everything that CI runs a spread of: parity, foldings, families; an hour
#   make test-families      every experts family of the installed transformers; writes docs/families.md
#   make test-transformers  parity on each supported transformers release
#   make test-gpu           the Triton kernels on a GPU
#   make bench              time of a training step
#   make bench-gradients    time of the gradient sync and the statistics
#   make bench-checkpoint   time, bytes and memory of saving, loading and exporting
#   make lint               ruff
#   make setup              .venv only
#   make clean              remove .venv, build outputs and caches; runs/ stays
#
# Options: PYTHON=python3.12, TRAIN_ARGS="--steps 50 --model qwen3_moe".
# Where the index serves torch with CUDA only, PIP_EXTRA_INDEX_URL can name one that has its CPU build.

PYTHON ?= python3
TRAIN_ARGS ?=
RANKS ?= 4
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# DeepSpeed compiles a communication op at first use and looks for ninja on PATH. Compiled during set-up: tests have a
# time limit. Kept in the venv: two venvs that share a folder would overwrite each other's.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export DS_ACCELERATOR := cpu
export OMP_NUM_THREADS := 1

.PHONY: train test test-full test-families test-transformers test-gpu bench bench-gradients bench-checkpoint lint setup clean

train: $(STAMP)
	$(VENV)/bin/deepspeed --quiet --num_accelerators $(RANKS) examples/train.py --deepspeed_config examples/ds_config.json $(TRAIN_ARGS)

test: lint
	$(PY) -m pytest tests/unit -q

test-full: $(STAMP)
	$(PY) -m pytest tests/unit -q -m full --override-ini addopts=

test-families: $(STAMP)
	$(PY) -m tests.families.parity

test-transformers: $(STAMP)
	$(PY) -m tests.on_transformers

test-gpu: $(STAMP)
	$(PY) -m pytest tests/unit -q -rs -m gpu --override-ini addopts=

bench: $(STAMP)
	$(PY) -m tests.perf.bench_step

bench-gradients: $(STAMP)
	$(PY) -m tests.perf.bench_gradients

bench-checkpoint: $(STAMP)
	$(PY) -m tests.perf.bench_checkpoint

lint: $(STAMP)
	$(PY) -m ruff check .

setup: $(STAMP)

# torch first: DeepSpeed's setup.py imports it. No build isolation: it would fetch another, unpinned torch or setuptools.
$(STAMP): setup.py pyproject.toml constraints.txt $(wildcard csrc/*)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt setuptools torch
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e ".[test,examples]"
	$(PY) -c 'from deepspeed.accelerator import get_accelerator as get; get().create_op_builder("ShareMemCommBuilder").load()'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis *.egg-info deepspeed_autoep/_*.so
	find deepspeed_autoep examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
