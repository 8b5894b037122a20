# `make help` lists the targets. The environment in .venv is made by whichever target needs it first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help reproduce test lint bench bench-optimisation env lock clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := wandb,trackers,parquet,paper,test,bench,lint
ROOMS := kfac experiments slurm analysis paper_figures hydra_plugins benchmarks examples tests

# The first of these that runs, is 3.11-3.13 and can make virtual environments; `make PYTHON=... TARGET` overrides.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 \
	&& { echo $$python; break; }; done)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

reproduce: $(STAMP) ## the paper's main comparison: train, profile, simulate, table and figure
	@$(BIN)/python -m experiments.reproduce $(ARGS)

test: $(STAMP) ## the whole test suite (ARGS="tests/kfac -k name" for a part)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## ruff (lint and format), mypy (strict), the import rules
	@status=0; \
	$(BIN)/ruff check --quiet $(wildcard $(ROOMS)) || status=1; \
	$(BIN)/ruff format --quiet --diff $(wildcard $(ROOMS)) || status=1; \
	$(BIN)/mypy --no-error-summary || status=1; \
	imports=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$imports"; status=1; }; \
	exit $$status

bench: $(STAMP) ## measured speed: schedules over rate-limited links, cost on one process (ARGS=speed or ARGS=cost for one)
	@$(BIN)/python -m benchmarks $(ARGS)

bench-optimisation: $(STAMP) ## steps and seconds to a target: K-FAC, SGD, AdamW and SOAP, tuned alike (ARGS=--help)
	@$(BIN)/python -m benchmarks.optimisation $(ARGS)

env: $(STAMP) ## only make the environment

lock: $(STAMP) ## write the versions of the environment to requirements.lock
	@$(BIN)/pip freeze --exclude-editable | LC_ALL=C sort -f > requirements.lock && touch $(STAMP)

clean: ## remove the environment and caches (runs and figures stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# requirements.lock holds the versions that the tests ran with; as constraints they pin what a platform needs, no more.
$(STAMP): pyproject.toml requirements.lock
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11-3.13 with the venv module found (tried python3.11, python3.12, python3.13, python3)." >&2; \
		echo "       Install one (Debian: apt-get install python3 python3-venv) or say which: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; fi
	@echo "Installing into $(VENV) with $(PYTHON) (a few minutes the first time) ..."
	@$(BIN)/python -c '' 2>/dev/null || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[$(EXTRAS)]'
	@touch $@
