# Entry points for people and for CI. `make help` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
UV     ?= $(BIN)/uv
# Twice the cores of a small machine: many tests wait for processes, servers or outages. By `worksteal`, tests of
# one file mostly run in one process, so that what they share is set up once.
JOBS   ?= 4
CHROMIUM ?= yes

.PHONY: help setup check test oracle attack browser demo bench picture lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*##/  make \1\t/p' Makefile

setup: $(STAMP)  ## create .venv with the exact versions of requirements.lock

$(STAMP): requirements.lock tools/no-deps.lock pyproject.toml
	@$(PYTHON) tools/preflight.py --venv $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked environment into $(VENV) (about 3 GB to download the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tools/no-deps.lock \
		|| echo "note: no build of topolosses for this system; only TopoScore needs it"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)
	@echo "ready: $(BIN)/stoker --help"

check: setup  ## lint, formatting, types, import direction
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest tests/test_direction.py -q

test: setup browser  ## run the test suite; CHROMIUM=no skips installing Chromium
	@$(BIN)/python tools/run_tests.py --jobs $(JOBS) $(ARGS)

oracle: setup  ## check that nothing users see has changed; ARGS='--only help runs'
	@$(BIN)/python tools/oracle.py check $(ARGS)

attack: setup  ## kill, pre-empt and damage runs, and print what survived; ARGS='--kills 500 --only kills'
	@$(BIN)/python tools/attack.py $(ARGS)

browser:  ## install Chromium for the browser tests, if possible
	@CHROMIUM=$(CHROMIUM) tools/browser.sh

demo: setup  ## train on the built-in digits
	@$(BIN)/stoker demo $(ARGS)

bench: setup  ## run benchmarks; DATA=folder of class folders with real images, ARGS=names
	@$(BIN)/python bench/run.py $(if $(DATA),--data $(DATA)) $(ARGS)

picture: setup  ## draw the README's picture anew, in about a minute on an idle machine
	@$(BIN)/python tools/picture.py $(ARGS)

lock:  ## resolve pyproject.toml into requirements.lock
	@$(UV) pip compile --quiet --universal --python-version 3.11 --all-extras --generate-hashes \
		--no-emit-index-url --custom-compile-command 'make lock' --upgrade pyproject.toml \
		--constraint tools/constraints.txt --output-file requirements.lock

clean:  ## remove the environment and all caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
