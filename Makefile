# Everything from nothing: `make demo` and `make test` build .venv, install, fetch the model and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The TPU compiler, for ahead-of-time tests. Aside, because jax looks for a TPU (and complains) wherever it can import it.
AOT := $(VENV)/aot

.PHONY: demo test test-second lint types check check-full clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

$(AOT): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(AOT) 'libtpu==0.0.42.*' \
		|| echo "libtpu cannot be installed here: TPU kernels will not be compiled by the tests"

demo: $(STAMP)
	$(BIN)/inms-jax demo

test: $(STAMP) $(AOT)
	$(BIN)/python -m pytest -m "not full"

test-second:
	PYTHON=$(PYTHON) .ci/second $(VENV)/second

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

check-full: lint types $(AOT)
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) out build dist *.egg-info
