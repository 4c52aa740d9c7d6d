# Everything from nothing: `make demo` and `make test` build .venv, install, fetch the model and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types check check-full clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/inms-jax demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not full"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

check-full: lint types $(STAMP)
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) out build dist *.egg-info
