# make train | test | test-all | lint | types | clean
#
# The first target that runs makes a virtual environment in $(VENV) with the tested versions (constraints.txt).
# To use an environment you already have, with its own torch, name its bin folder; nothing is installed then:
#   make test VENV_BIN=/path/to/environment/bin
# The package itself is taken from this folder.

PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
ARGS ?=

ifdef VENV_BIN
READY :=
else
VENV_BIN := $(VENV)/bin
READY := $(VENV)/.installed
endif

# One thread a process: the processes share the cores.
RUN := PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1

.PHONY: train test test-all lint types clean

train: $(READY)
	$(RUN) $(VENV_BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC) \
	  launch/train.py --config configs/quickstart.yaml $(ARGS)

test: $(READY)
	PYTHONPATH=$(CURDIR) $(VENV_BIN)/python -m pytest -m "not gpu and not exhaustive" $(ARGS)

test-all: $(READY)
	PYTHONPATH=$(CURDIR) $(VENV_BIN)/python -m pytest -m "(exhaustive or not exhaustive) and not gpu" $(ARGS)

lint: $(READY)
	$(VENV_BIN)/python -m ruff check .
	$(VENV_BIN)/python -m ruff format --check .

types: $(READY)
	$(VENV_BIN)/python -m mypy

# torch first and alone: packages that only ask for "some torch" then find it there.
$(VENV)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable ".[train,test,hf,deepspeed]"
	touch $@

# What runs/ holds (checkpoints, exports) stays.
clean:
	rm -rf $(VENV) .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
