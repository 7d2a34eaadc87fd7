# The two commands of the README are `make first-run` and `make test`; both stand on `make setup`.
PYTHON ?= python3
BIN := .venv/bin
# Changes when what is installed should change, so that a second `make` installs nothing.
STAMP := .venv/.installed

.PHONY: setup first-run test clean help

help:
	@echo "make first-run   set up and run lohan on its built-in example"
	@echo "make test        set up, then ruff, mypy and the whole test suite"
	@echo "make setup       only prepare .venv"
	@echo "make clean       remove .venv and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

first-run: setup
	$(BIN)/lohan first-run

test: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
