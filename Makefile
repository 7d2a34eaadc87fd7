# The two commands of the README are `make first-run` and `make test`; both stand on `make setup`.
PYTHON ?= python3
BIN := .venv/bin
# Exists only when an installation ran to its end, and is older than what should be installed when that changes:
# a second `make` installs nothing, an interrupted one is repaired.
STAMP := .venv/.installed
# The stamp proves nothing when the command itself is gone.
ifeq ($(wildcard $(BIN)/lohan),)
$(STAMP): again
endif

.PHONY: help setup first-run test bench docs clean again
.DEFAULT_GOAL := help

help:
	@echo "make first-run   set up and run lohan on its built-in example"
	@echo "make test        set up, then ruff, mypy and the whole test suite"
	@echo "make bench       lohan beside plain PyTorch, FSDP2 and DeepSpeed; hours (ARGS=--quick: one size)"
	@echo "make setup       only prepare .venv"
	@echo "make docs        write docs/api.md again from the docstrings"
	@echo "make clean       remove .venv and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "lohan needs Python 3.11 or newer and there is no '$(PYTHON)'. Install it, or name it: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "lohan needs Python 3.11 or newer and '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name a newer one: make setup PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@# A .venv that was cut off in the making, or has lost its interpreter, starts afresh: half a package can look whole.
	@{ test ! -e .venv/.installing && $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; } || { \
		echo "Making .venv"; $(PYTHON) -m venv --clear .venv; }
	@touch .venv/.installing
	@echo "Installing lohan and what it needs into .venv (a few minutes on a slow line)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm .venv/.installing
	@touch $(STAMP)

first-run: setup
	@$(BIN)/lohan first-run

test: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadfile

bench: setup
	@$(BIN)/python benchmarks/bench.py $(ARGS)

docs: setup
	@$(BIN)/python docs/api.py

clean:
	rm -rf .venv benchmarks/peers/.venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
