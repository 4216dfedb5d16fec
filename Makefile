# Each target makes what it needs; on a fresh machine one command is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-slow lint format bench clean help

help:          ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.run   ## see NVFP4 break a small model's manners, and the cheapest repair; writes runs/demo
	$(BIN)/manners demo

test: $(VENV)/.dev   ## the test suite, under 8 minutes on 2 cores
	$(BIN)/python -m pytest

test-slow: $(VENV)/.dev   ## the checks that are too slow for every day, the bundled pair among them
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev   ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev   ## put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev   ## fake-quant and packing, side by side with compressed-tensors
	$(BIN)/python benchmarks/cpu_nvfp4.py

$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable '.[dev]'
	@touch $@

clean:         ## remove the environment and the runs
	rm -rf $(VENV) runs
