# PYTHON       the interpreter that .venv is made with                              (python3)
# PIP_OPTIONS  passed to pip; on Linux without a GPU, the small build of torch:
#              make test PIP_OPTIONS='--extra-index-url https://download.pytorch.org/whl/cpu'
# ARGS         passed to gradleak or pytest:  make audit ARGS='--targets 16'    make test ARGS='-k data'
PYTHON ?= python3
PIP_OPTIONS ?=
ARGS ?=

BIN := .venv/bin
# --no-compile: of 15,000 modules a third is ever imported, and compiled then; pip would take half a minute for all.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_OPTIONS) -c constraints.txt
# Written after an install that worked; older than pyproject.toml or constraints.txt means: install again.
CORE := .venv/.installed-core
FULL := .venv/.installed-full
# One thread a test worker: two workers already use the machine, and more threads only wait for each other.
# --dist loadgroup: tests that share processes (a Ray cluster, a SuperLink) stay with one worker.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup audit docs browser axe test test-all check bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(FULL) ## make .venv and install everything for development into it

audit: $(CORE) ## install what an audit needs and run the built-in one: real images, on a CPU
	$(BIN)/gradleak audit $(ARGS)

# In CI the report is opened in a real browser. Debian's, since Playwright's own is not on a package registry; where it
# cannot be had the test says that it was skipped.
browser:
	@test -z "$(CI)" || command -v chromium >/dev/null || test "$$(id -u)" -ne 0 || \
		timeout 240 sh -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium' >/dev/null 2>&1 || \
		echo 'No Chromium could be installed: the browser test will be skipped.'

# With it axe-core, which looks for what a screen reader or a keyboard cannot use.
axe:
	@test -z "$(CI)" || test -f node_modules/axe-core/axe.min.js || ! command -v npm >/dev/null || \
		timeout 120 npm install --no-save --ignore-scripts --silent axe-core@4 >/dev/null 2>&1 || \
		echo 'No axe-core could be installed: the accessibility test will be skipped.'

test: $(FULL) ## run the tests (not those marked system, slow or gpu)
	$(TESTS) $(ARGS)

test-all: $(FULL) browser axe ## run every test, those of whole systems and slow ones too (not gpu)
	$(TESTS) -m "not gpu" $(ARGS)

check: $(FULL) ## ruff, mypy and the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TESTS) $(ARGS)

docs: $(FULL) ## build the documentation site into build/site
	$(BIN)/python -m mkdocs build --strict --quiet

bench: $(FULL) ## measure speed on this machine
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove caches and build outputs; keeps .venv and runs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing venv makes, so a half-made .venv is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gradleak needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

$(CORE): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing into .venv: a minute or more, torch is large'
	$(INSTALL) -e '.[data]'
	@touch $@

$(FULL): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing into .venv: a minute or more, torch is large'
	$(INSTALL) -e '.[dev,data,tables,dp,metrics,secure,fl-sim,diffusion,zoo,docs]'
	@touch $(CORE) $@
