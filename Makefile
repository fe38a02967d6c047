# make demo       a long text through two ranks, on the real model
# make test       make check, then the tests
# make test-slow  more of some tests: repetitions, larger sizes, longer lists and more examples, which make test leaves out
# make test-versions  half an hour of the tests with the oldest and the newest torch and transformers of pyproject.toml
# make check      lint, format and types
# make setup      only what the others need first: an environment in .venv with the pinned dependencies, and kernels for
#                 this processor where there is a C++ compiler
# make clean      remove caches; the environment and the downloaded model stay
#
# Each sets up what it needs, once. Variables:
#   PYTHON=python3.12   the interpreter to start from (3.11 or newer)
#   VENV=path           where the environment is
#   SYSTEM_TORCH=1      take the torch that PYTHON already has, such as a CUDA build
#   WORKERS=2           how many tests run side by side; one more than cores where other programs run, too
#   SAMPLE=40           of make test-slow: about one in so many tests, the same ones every time
#   PYTEST_ARGS=...     more arguments for pytest, such as "-k exactness"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-slow test-versions check setup clean
.DEFAULT_GOAL := help

VENV ?= .venv
SYSTEM_TORCH ?=
WORKERS ?= 2
SAMPLE ?= 1
PYTEST_ARGS ?=
# Tried rather than looked up: a version manager's shim may be there for a Python that is not.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

IN_VENV := $(VENV)/bin/python
PIP_INSTALL := $(IN_VENV) -m pip install --disable-pip-version-check --no-input
STAMP := $(VENV)/.runahead-is-installed

TEXT := examples/frankenstein_letters.txt
QUESTION := Summarize this story in one sentence.

# A rank has one thread and the tests start several ranks; a number given from outside is kept.
export OMP_NUM_THREADS ?= 1

.PHONY: help
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# Standalone: a free port of this machine, so that it does not matter what else is running.
demo: $(STAMP)
	$(IN_VENV) -m torch.distributed.run --standalone --nproc-per-node=2 launch/infer.py model=smollm2 \
		prompt.file=$(TEXT) prompt.question='$(QUESTION)' generation.max_new_tokens=64

# Tests go side by side, a file in one process, those first that take longest (tests/runs.py). A process that ends
# early fails its test and the run: in its place another would wait for ever for the rest of a file. Tests of whole jobs,
# of servers and of the rates of links come after them, two at a time, as most of them wait: with more, on a busy machine a
# rank is late, as if it were lost.
JOBS := tests/doctor tests/faults tests/gpu/test_nccl_cuda.py tests/gpu/test_ranks_cuda.py tests/gpu/test_serving_cuda.py \
	tests/network tests/serving/test_endurance.py tests/serving/test_page.py tests/serving/test_server.py tests/slurm \
	tests/test_wheel.py
BY_FILE := --dist loadfile --no-loadscope-reorder --max-worker-restart=0
SIDE_BY_SIDE := -n $(WORKERS) $(BY_FILE) $(JOBS:%=--ignore=%)

# $(call run,arguments,profile): a run of tests. Those that fail run once more, alone: what fails again fails the run, and what
# passes is named as flaky. 5: nothing was selected. 1: tests failed; anything else is no matter of one test.
PYTEST := $(IN_VENV) -m pytest --durations=40
run = $(PYTEST) --cache-clear $(1) $(PYTEST_ARGS) || { status=$$?; test $$status = 5 || { test $$status = 1 && \
	$(PYTEST) --last-failed --last-failed-no-failures=none --again --maxfail=10 $(2) $(PYTEST_ARGS); }; }

test: check
	$(call run,-m 'not slow' $(SIDE_BY_SIDE))
	$(call run,-m 'not slow' -n 2 $(BY_FILE) $(JOBS))

MANY := --hypothesis-profile=many
test-slow: $(STAMP)
	$(call run,-m 'slow or hypothesis' $(MANY) $(SIDE_BY_SIDE) --sample=$(SAMPLE),$(MANY))
	$(call run,-m slow $(JOBS) --sample=$(SAMPLE))

test-versions: $(STAMP)
	$(IN_VENV) -m tests.versions --workers $(WORKERS)

check: $(STAMP)
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy

setup: $(STAMP)

# torch goes first and by its version alone: where pip is offered a CPU build of that version it takes it, and the second
# install leaves it in place. setuptools is pinned too, and builds what comes without a wheel (--no-build-isolation).
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv and pip; name one with make PYTHON=..." >&2; exit 1; }
	$(IN_VENV) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV)
ifdef SYSTEM_TORCH
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP_INSTALL) -c $(VENV)/constraints.txt setuptools
else
	cp constraints.txt $(VENV)/constraints.txt
	$(PIP_INSTALL) -c $(VENV)/constraints.txt torch setuptools
endif
	$(PIP_INSTALL) -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	-$(IN_VENV) -m launch.kernels
	touch $@

clean:
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist runahead.egg-info
	find $(wildcard runahead partitioner policies launch benchmarks conf tests) -name __pycache__ -prune -exec rm -rf {} +
