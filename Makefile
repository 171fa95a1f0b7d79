# Everything lives in .venv. Variables that may be given on the command line:
#   PYTHON=python3.12      the interpreter that .venv is made from, 3.11 or newer
#   PIP_ARGS=...           further arguments for pip, such as an index with CPU builds of torch
#   ARGS=...               further arguments for pytest (make test) or benchmarks (make bench, make accelerator)
#   OLDEST_PYTHON=...      the oldest interpreter that pyproject.toml names (make test-oldest)
#   RESULTS=...            the folder for what `make accelerator` finds

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
OLDEST_PYTHON ?= python3.11
RESULTS ?= benchmarks/results

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
INSTALL := $(PIP) install --constraint constraints.txt $(PIP_ARGS)
OLDEST := .venv-oldest/bin
OLDEST_INSTALL := $(OLDEST)/python -m pip --disable-pip-version-check --quiet --quiet \
	install --constraint constraints-oldest.txt $(PIP_ARGS)

QUICK := "not slow and not foreign and not exhaustive"

# pyright would look on the network for a newer version of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Tests start many processes, each of which would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-all test-oldest accelerator check bench dist-test docs docs-links clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a flow in three memory modes, and compare them"
	@echo "make test    run the tests"
	@echo "make test-all     all cases of them, plans for models of other libraries, what takes minutes"
	@echo "make test-oldest  the tests with the oldest Python, torch and neighbours that are named"
	@echo "make accelerator  run the tests and benchmarks of a GPU, with the Python that is on the path"
	@echo "make dist-test    build a wheel and an sdist in dist, and test them without the repository"
	@echo "make check   run the linters, the type checker and the import contracts"
	@echo "make bench   measure against other libraries"
	@echo "make docs    build the site in docs/_build/html, tutorials executed and links checked"
	@echo "make docs-links   look up all addresses that the site links to"
	@echo "make setup   only make .venv, which all of these do first"
	@echo "make clean   remove .venv and all caches"

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "recoup needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up .venv (a few minutes the first time) ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation --editable '.[dev,examples]'
	@touch $@

# Without what they ask for: pyproject.toml says why.
.venv/.bench: .venv/.ready
	@$(INSTALL) --no-deps dm-tree FrEIA memcnn nflows normflows pytorch-nlp returnn revlib revtorch torch_remat trl zuko
	@touch $@

demo: setup
	@rm -rf runs/demo
	@for memory in linear sqrt constant; do \
		$(BIN)/python examples/flow.py fit -c examples/configs/flow/glow-digits.yaml \
			--model.memory $$memory --trainer.max_epochs 10 --model.num_decay_steps 120 \
			--trainer.logger.name demo --trainer.logger.version $$memory \
			--trainer.enable_progress_bar false || exit 1; \
	done
	@$(BIN)/python examples/flow.py predict -c runs/demo/constant/config.yaml \
		--trainer.logger.version samples --ckpt_path runs/demo/constant/checkpoints/best.ckpt

test: setup
	@$(BIN)/python -m pytest -n 2 -m $(QUICK) $(ARGS)

# Programs and models of other libraries, which tests train. timm needs a torchvision that is built
# for the same torch, which an index with CPU builds need not have: there its tests are skipped.
# Libraries of flows come without what they ask for, which is there.
.venv/.foreign: .venv/.ready
	@$(INSTALL) datasets diffusers peft sentence-transformers torchao trl
	@$(INSTALL) --no-deps FrEIA nflows normflows zuko
	@touch $@

test-all: .venv/.foreign
	@$(BIN)/python -m pytest -n 2 $(ARGS)

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	@$(OLDEST_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "Python 3.11 is the oldest that is named; say where: make OLDEST_PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv-oldest (several gigabytes) ..."
	@$(OLDEST)/python -m pip --version >/dev/null 2>&1 || $(OLDEST_PYTHON) -m venv .venv-oldest
	@$(OLDEST_INSTALL) hatchling editables
	@$(OLDEST_INSTALL) --no-build-isolation --editable '.[test,examples]' torchvision
	@$(OLDEST_INSTALL) --no-deps diffusers timm requests charset-normalizer urllib3 certifi
	@touch $@

test-oldest: .venv-oldest/.ready
	@$(OLDEST)/python -m pytest -n 2 -m $(QUICK) $(ARGS)

# Neither .venv nor the network: a machine with a GPU is often lent for minutes, and bare.
accelerator:
	@PYTHONPATH=src $(PYTHON) benchmarks/accelerator.py --results $(RESULTS) $(ARGS)

check: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports

dist-test: setup
	@PIP_ARGS='$(PIP_ARGS)' $(BIN)/python .ci/dist_test.py dist

bench: .venv/.bench
	@$(BIN)/python benchmarks/run.py $(ARGS)

.venv/.docs: .venv/.ready
	@$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

# Every page anew: tutorials show what this code does, not what an earlier one did.
docs: .venv/.docs
	@rm -rf docs/_build/html
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@$(BIN)/python docs/check_links.py docs/_build/html

# Needs the network, which `make docs` does not.
docs-links: .venv/.docs
	@$(BIN)/python -m sphinx --builder linkcheck --quiet --define nb_execution_mode=off \
		--define suppress_warnings=myst-nb.lexer \
		docs docs/_build/links

clean:
	@rm -rf .venv .venv-oldest docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist
	@find . -type d -name __pycache__ -prune -exec rm -rf {} +
