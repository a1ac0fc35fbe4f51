# Every target builds the virtual environment it needs; nothing but git, make and Python 3.11 is assumed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint docs parity trust clean help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /'

$(STAMP): pyproject.toml requirements-dev.txt
	@echo "Setting up $(VENV) ..."; start=$$(date +%s); \
	$(PYTHON) -m venv $(VENV) && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -r requirements-dev.txt && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-build-isolation --no-deps setuptools wheel && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-build-isolation -e . && \
	touch $(STAMP) && echo "Set up in $$(( $$(date +%s) - start )) s."

demo: $(STAMP)  ## post-train a real 135M model on embedded data and show what changed
	@$(BIN)/posttrain demo

test: $(STAMP)  ## every test but the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(STAMP)  ## tests with the real model
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)  ## ruff and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

docs: $(STAMP)  ## write the option tables of docs/ from the configs
	$(BIN)/python scripts/write_option_tables.py

parity: $(STAMP)  ## side by side with TRL 1.16.0, in an environment of its own
	benchmarks/parity/run.sh

clean:
	rm -rf $(VENV) .venv-trl runs build dist *.egg-info
