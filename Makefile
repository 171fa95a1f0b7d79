# Everything lives in .venv. Variables that may be given on the command line:
#   PYTHON=python3.12      the interpreter that .venv is made from, 3.11 or newer
#   PIP_ARGS=...           further arguments for pip, such as an index with CPU builds of torch
#   ARGS=...               further arguments for pytest (make test) or the benchmark (make bench)

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
INSTALL := $(PIP) install --constraint constraints.txt $(PIP_ARGS)

# pyright would look on the network for a newer version of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help setup demo test check bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a flow in three memory modes, and compare them"
	@echo "make test    run the tests"
	@echo "make check   run the linters, the type checker and the import contracts"
	@echo "make bench   measure against other libraries"
	@echo "make setup   only make .venv, which all of these do first"
	@echo "make clean   remove .venv and all caches"

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "recoup needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up .venv (a few minutes the first time) ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation --editable '.[dev,recipes]'
	@touch $@

# Without what they ask for: pyproject.toml says why.
.venv/.bench: .venv/.ready
	@$(INSTALL) --no-deps FrEIA memcnn nflows normflows pytorch-nlp returnn revlib revtorch torch_remat zuko
	@touch $@

demo: setup
	@$(BIN)/recoup flow demo

test: setup
	@$(BIN)/python -m pytest -n 2 $(ARGS)

check: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports

bench: .venv/.bench
	@$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist
	@find . -type d -name __pycache__ -prune -exec rm -rf {} +
