# Everything a fresh machine needs is Python 3.11 or later with venv. `make demo` and `make test` do the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment is made again when, and only when, what it is made from changes.
STAMP := $(VENV)/made-from-$(shell cat pyproject.toml requirements.lock | cksum | cut -d ' ' -f 1)
DEMO := runs/demo

.PHONY: help install demo test test-slow check audit torture lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train on handwritten digits, evaluate, predict; leaves $(DEMO)"
	@echo "make test     the tests, but for the slowest; a quarter of an hour on two cores"
	@echo "make test-slow  the slowest"
	@echo "make check    style, types, layers"
	@echo "make audit    known vulnerabilities in what is installed; fails where no advisory service answers"
	@echo "make torture  kills training 100 times per family and at every point of writing; 20 minutes"
	@echo "make install  the environment alone, in $(VENV)"
	@echo "make lock     write requirements.lock anew: the newest versions that pyproject.toml allows"
	@echo "make clean    remove $(VENV) and $(DEMO)"

install: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weft needs Python 3.11 or later: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (PyTorch is large; once, a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/made-from-*
	@touch $@

demo: $(STAMP)
	$(BIN)/weft train digits --out $(DEMO) --force
	$(BIN)/weft evaluate $(DEMO) digits
	$(BIN)/python examples/save_digits.py $(DEMO)-pictures
	$(BIN)/weft predict $(DEMO) $(DEMO)-pictures --top-k 1
	@echo "Model: $(DEMO)/best   Report: $(DEMO)/report/report.html"

# One thread per worker: two workers with two threads each are slower than two with one.
test: $(STAMP)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

audit: $(STAMP)
	$(BIN)/python .ci/audit.py

torture: $(STAMP)
	$(BIN)/python benchmarks/torture/torture.py --kills 100 --csv benchmarks/torture/results.csv

lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --upgrade --extra dev \
		pyproject.toml --output-file requirements.lock
	sed -i '1i # Every package that development installs, with hashes: `make lock` writes this from pyproject.toml.' requirements.lock

clean:
	rm -rf $(VENV) $(DEMO) $(DEMO)-pictures
