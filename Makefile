# Each target works in a virtual environment that is made on first use.
#   make train OPTIM=sgd ARGS="--ranks 4 --seq 256"      options: .venv/bin/python -m vescale_compile train --help
#   make test TORCH=torch==2.12.0 VENV=.venv-2.12        another torch, in an environment of its own
PYTHON ?=
TORCH ?= torch==2.13.0
VENV ?= .venv
OPTIM ?= adamw
DUMP ?= vescale_dump
ARGS ?=

RUN := $(VENV)/bin/python
# Two files of tests at a time; many start two to four ranks of their own, which wait for one another.
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
READY := $(VENV)/.ready

.PHONY: train test test-fast bench lint

# Graphs are dumped by the vescale backend alone.
train: $(READY)
	$(RUN) -m vescale_compile train --optim $(OPTIM) $(if $(filter --backend%,$(ARGS)),,--dump $(DUMP)) $(ARGS)

test: lint
	$(PYTEST) $(ARGS)

test-fast: $(READY)
	$(PYTEST) -m "not slow" $(ARGS)

bench: $(READY)
	$(RUN) bench/compare.py $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy bench

# Running each candidate tells a Python from a version manager's shim for one that is not installed.
# torch comes first, so that the version above is the one the package is installed beside.
$(READY): pyproject.toml
	@set -e; \
	for python in $(or $(PYTHON),python3.11 python3.12 python3); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
	    test -x $(RUN) || $$python -m venv $(VENV); \
	    $(RUN) -m pip install "$(TORCH)"; \
	    $(RUN) -m pip install -e ".[dev]"; \
	    touch $(READY); \
	    exit 0; \
	  fi; \
	done; \
	echo "Python 3.11 or 3.12 is needed; name one with: make PYTHON=..." >&2; exit 1
