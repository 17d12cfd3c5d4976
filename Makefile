# fa4: set-up, demo, tests and figures. Needs Python 3.11 or newer, make and a package index; no GPU.
#
#   make demo        set up .venv, then attention on a language model's Q, K and V, on a modelled B200
#   make test        the same set-up, then every test             (make test-fast: only the quick ones)
#   make lint type   ruff and mypy
#   make bench       print every figure that README names
#   make mutate      break every synchronisation of our kernels in turn: the emulator must notice
#   make test-hw     on a machine with a Hopper GPU: the emulator against it, instruction by instruction
#
# PYTHON  the interpreter .venv is made with
# JOBS    worker processes of the tests (auto: one a core, 8 at most)
# TORCH   what pip installs as torch, before everything else, so that nothing else picks a build.
#         It is passed to pip as words, so options work too; README shows how to choose a CPU build.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-fast test-exhaustive test-peers test-hw lint format type mutate fuzz-ptx cuda-ptx bench clean FORCE

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Worker processes; a file's tests stay together, for they share compiled kernels.
JOBS ?= auto
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_INPUT := fa4/demo/smollm2_layer14.safetensors

help:
	@sed -n '3,8s/^# *//p' Makefile

# The torch that was asked for is kept in a file that changes only when the request does.
$(VENV)/torch.request: FORCE
	@mkdir -p $(VENV)
	@printf '%s\n' '$(TORCH)' | cmp -s - $@ || printf '%s\n' '$(TORCH)' > $@

$(VENV)/.installed: pyproject.toml $(VENV)/torch.request
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fa4 needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V): make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[test,dev]'
	@touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/fa4 run --input $(DEMO_INPUT) --causal

test: $(VENV)/.installed
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(VENV)/.installed
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

# Every mutant of our kernels, and a hundred schedules: minutes, of which `make test` runs a sample.
test-exhaustive: $(VENV)/.installed
	$(PYTEST) --exhaustive -m exhaustive $(PYTEST_ARGS)

# Other authors' kernels on the emulator: a larger install, so that `make test` skips them.
$(VENV)/.installed-peers: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[test,peers]'
	@touch $@

test-peers: $(VENV)/.installed-peers
	$(PYTEST) tests/peers $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

type: $(VENV)/.installed-dev
	$(BIN)/mypy

MUTATED := gemm forward_dense forward_causal
mutate: $(VENV)/.installed
	for name in $(MUTATED); do \
	  $(BIN)/python -m kernels.emulator mutate tests.emulator.mutation_targets:$$name; done

# What is recorded of a Hopper GPU, anew on this machine's, and the emulator held against it. Says so
# and does nothing where there is none.
test-hw: $(VENV)/.installed
	$(BIN)/python -m tests.emulator.hardware.check

# Fresh mutants of valid PTX, judged by the emulator's front end and by ptxas, which must be of CUDA
# 13.4 or newer (python -m pip install nvidia-cuda-nvcc has it): make fuzz-ptx PTXAS=.../ptxas
PTXAS ?= ptxas
FUZZ_ARGS ?= --count 20000
fuzz-ptx: $(VENV)/.installed
	PTXAS='$(PTXAS)' $(BIN)/python -m tests.emulator.ptx_fuzz compare $(FUZZ_ARGS)

# PTX of the CUDA files that the emulator's tests run: needs nvcc, so the result is committed.
NVCC ?= nvcc
CUDA_PTX := $(patsubst %.cu,%.ptx,$(wildcard tests/emulator/cuda/*.cu))
tests/emulator/cuda/blackwell.ptx: NVCC_ARCH := sm_100a
NVCC_ARCH := sm_90
cuda-ptx: $(CUDA_PTX)
%.ptx: %.cu
	cd $(@D) && $(NVCC) -arch=$(NVCC_ARCH) -lineinfo -ptx $(<F) -o $(@F)
	sed -i 's#"[^"]*/tests/emulator/cuda/#"#' $@

bench: $(VENV)/.installed
	$(BIN)/python -m tests.figures

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
