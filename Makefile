# Everything a fresh machine needs is Python 3.11 or later with venv. `make demo` and `make test` do the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
# An environment is installed again when, and only when, its lock file or pyproject.toml changes.
stamp = $(VENV)/made-from-$(1)-$(shell cat pyproject.toml $(1).lock | cksum | cut -d ' ' -f 1)
CORE := $(call stamp,requirements-core)
FULL := $(call stamp,requirements)
DEMO := runs/demo
LOCK := $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header pyproject.toml

.PHONY: help install demo test test-slow test-nightly test-avx2 docs check audit torture fuzz gpu benchmarks-smoke lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train on handwritten digits, evaluate, predict; leaves $(DEMO)"
	@echo "make test     the tests, except the slowest"
	@echo "make test-slow  slow tests of what weft promises; .ci/run has them"
	@echo "make test-nightly  slow tests of other programs and of every case of a property; before a release"
	@echo "make test-avx2  tests of networks and exports with the instructions of a processor without AVX-512"
	@echo "make check    style, wording, types, layers, scripts and tables of benchmarks/"
	@echo "make docs     the documentation site, in docs/_build/html; warnings are errors"
	@echo "make audit    known vulnerabilities in what is installed; fails where no advisory service answers"
	@echo "make torture  kills training 100 times per family and at every point of writing; 20 minutes"
	@echo "make fuzz     random input for the readers of images, recipes and checkpoints, and for the service, at full count"
	@echo "make gpu      checks and measures on a GPU, 7 minutes a call, resumable; rehearse: make gpu DEVICE=cpu SCALE=small"
	@echo "make benchmarks-smoke  every script of benchmarks/ in its smallest form, in a copy; an hour. ONLY=speed/ some alone"
	@echo "make install  the environment alone, in $(VENV)"
	@echo "make lock     update requirements.lock to the newest versions that pyproject.toml allows"
	@echo "make clean    remove $(VENV) and $(DEMO)"

install: $(FULL)

# uv checks the hash of every package. pip installs uv itself, with the hashes of the same lock file.
$(CORE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weft needs Python 3.11 or later: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what training needs into $(VENV) (5.5 GB, most of it PyTorch) ..."
	@awk '/^[a-z]/ { uv = /^uv==/ } uv' requirements.lock | \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement /dev/stdin
	@$(UV) pip install --python $(BIN)/python --require-hashes --requirements requirements-core.lock || \
		{ echo "uv cannot install; trying pip ..."; $(BIN)/python -m pip install --quiet --require-hashes --requirement requirements-core.lock; }
	@$(UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/made-from-*
	@touch $@

$(FULL): $(CORE)
	@echo "Installing what the tests need into $(VENV) (1.9 GB) ..."
	@$(UV) pip install --python $(BIN)/python --require-hashes --requirements requirements.lock || \
		{ echo "uv cannot install; trying pip ..."; $(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock; }
	@rm -f $(VENV)/made-from-requirements-[0-9]*
	@touch $@

demo: $(CORE)
	$(BIN)/weft train digits --out $(DEMO) --force --epochs 4
	$(BIN)/weft evaluate $(DEMO) digits
	$(BIN)/python examples/save_digits.py $(DEMO)-pictures
	$(BIN)/weft predict $(DEMO) $(DEMO)-pictures --top-k 1
	@echo "Model: $(DEMO)/best   Report: $(DEMO)/report/report.html"

# One thread per worker, and one worker more than cores, since some tests wait for other processes.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() + 1, 5))')
PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(FULL)
	$(PYTEST) -m "not slow"

test-slow: $(FULL)
	$(PYTEST) -m "slow and not nightly"

test-nightly: $(FULL)
	$(PYTEST) -m nightly tests benchmarks/tests

# With the instructions of a processor without AVX-512, VNNI and bf16, on any x86 processor.
test-avx2: $(FULL)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
		$(PYTEST) -m "not slow" tests/deploy tests/parity tests/layers

check: $(FULL)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ruff check --isolated --preview --select PLW1514 src # text files have an encoding; not stable yet
	$(BIN)/python .ci/lint.py
	$(BIN)/python .ci/advice.py
	$(BIN)/pyright
	$(BIN)/pyright -p benchmarks/pyrightconfig.json
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" benchmarks/tests

docs: $(FULL)
	$(BIN)/python -m sphinx -W --keep-going -n -q -E -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "Documentation: docs/_build/html/index.html"

audit: $(FULL)
	$(BIN)/python .ci/audit.py

torture: $(FULL)
	$(BIN)/python benchmarks/torture/torture.py --kills 100 --csv benchmarks/torture/results.csv

fuzz: $(FULL)
	WEFT_NIGHTLY=1 $(PYTEST) tests/data/test_fuzz.py tests/recipes/test_load.py \
		tests/checkpoints/test_malicious.py tests/serve/test_process.py tests/test_reading.py -k "mutants or any or cost or whatever or fuzz"

# Runs without .venv: with any Python that has torch, and installs nothing. A PYTHON that is given replaces that of .venv.
# A call ends after SECONDS; the next continues. RETRY=1 measures failed cells again, ONLY="bf16 cvt" some cells alone.
DEVICE ?= cuda
SCALE ?= full
SECONDS ?= 420
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
gpu:
	@$(GPU_PYTHON) benchmarks/gpu/run.py \
		--device $(DEVICE) --scale $(SCALE) --seconds $(SECONDS) $(if $(PART),--part $(PART)) $(if $(ONLY),--only $(ONLY)) \
		$(if $(RETRY),--retry) $(if $(CIFAR10),--cifar10 $(CIFAR10))

benchmarks-smoke: $(FULL)
	$(BIN)/python benchmarks/smoke.py $(ONLY)

lock: $(FULL)
	$(LOCK) --upgrade --extra dev --output-file requirements.lock
	$(LOCK) --constraint requirements.lock --output-file requirements-core.lock
	sed -i '1i # Packages for development, with hashes. `make lock` writes this file from pyproject.toml.' requirements.lock
	sed -i '1i # Packages for training, with hashes: a part of requirements.lock. `make lock` writes this file.' requirements-core.lock

clean:
	rm -rf $(VENV) $(DEMO) $(DEMO)-pictures docs/_build docs/_generated
