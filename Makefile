# The two commands that matter are `make train` and `make test`. Each sets .venv up by itself, once.
#
#   make train ARGS="--mesh dp=2,ep=8,pp=4 train.steps=20"
#   make test  PYTEST_ARGS="tests/moe -k rowwise"      WORKERS=0 for one process, with output as it comes
#   make setup EXTRAS=cuda13                           adds an extra of pyproject.toml to .venv; later calls keep it

ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
EXTRAS ?= test,notebooks,tensorboard
python := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow lint fix clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

setup:  ## bring .venv up to date with pyproject.toml (every target does it first)
	@$(python) tools/set_up.py --check --extras "$(EXTRAS)" 2>/dev/null || { \
	    interpreter="$$(bash tools/find_python.sh)" && "$$interpreter" tools/set_up.py --extras "$(EXTRAS)"; }

train: setup  ## train: ARGS="--config configs/tiny.yaml --mesh dp=2,ep=2 train.steps=100"
	@exec $(python) -m moejax.train $(ARGS)

test: lint  ## ruff, pyright, then the tests: PYTEST_ARGS="tests/moe -k rowwise"
	@exec $(python) -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-slow: setup  ## the tests marked slow, which CI runs too; with EXTRAS=...,aot also those that compile for absent GPUs
	@exec $(python) -m pytest --numprocesses $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS)

lint: setup  ## ruff and pyright
	@$(python) -m ruff check --quiet .
	@$(python) -m pyright --level error

fix: setup  ## let ruff mend what it can
	@$(python) -m ruff check --fix .

clean:  ## remove .venv and the caches; runs/ stays
	rm -rf .venv .cache .hypothesis .pytest_cache .ruff_cache *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
