# Everything happens in .venv, which each target sets up as far as it needs; a second call does no set-up and needs no
# network. Asked of the machine: Python >= 3.10, a C compiler with the C library's headers, make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools reminds at length that an editable installation lies in the working directory; that is its purpose here.
INSTALL := $(BIN)/python -W ignore:Editable -m pip install --quiet
C_SOURCES := setup.py $(wildcard hostcache/*.[ch] staging/*.[ch] npu/*.[ch] */_*_build.py)

.PHONY: demo test oracle lint types docs jobs fuzz clean

demo: $(VENV)/.runs
	@$(BIN)/rockpage demo

test: $(VENV)/.tests
	$(BIN)/python -m pytest

# What compares with transformers and torch, which are large: every model family, tokenizer and chat template.
oracle: $(VENV)/.oracle
	$(BIN)/python -m pytest -m "not wheel" $(shell sed -n 's|^    "\([a-z]*/test_.*\.py\)",|tests/\1|p' tests/conftest.py)

lint: $(VENV)/.tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.tests
	$(BIN)/mypy

# The library's reference, from the docstrings; begin with build/docs/index.html.
docs: $(VENV)/.tests
	$(BIN)/python docs/build.py build/docs

# What takes minutes: the wheel in clean environments, and longer sweeps.
jobs: $(VENV)/.tests
	$(BIN)/python -m pytest -m "wheel or long"

# Hostile files, templates and requests, for ten minutes; FUZZ_SECONDS=30 for a look, FUZZ_SEED=... for the same again.
fuzz: $(VENV)/.tests
	$(BIN)/python -m pytest -s -m fuzz tests/fuzz

clean:
	rm -rf $(VENV) build dist *.egg-info hostcache/*.so staging/*.so npu/*.so

$(VENV)/.made:
	@$(PYTHON) bootstrap.py $(VENV)
	$(INSTALL) --upgrade pip "setuptools>=77" "cffi>=1.17"
	@touch $@

# Editable: the Python files are used where they lie, the C modules are built beside them.
# Without isolation the build tools are those of .venv, so a rebuild needs no network.
$(VENV)/.runs: $(VENV)/.made pyproject.toml $(C_SOURCES)
	$(INSTALL) --no-build-isolation --editable ".[model]"
	@touch $@

$(VENV)/.tests: pyproject.toml | $(VENV)/.runs
	$(INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

$(VENV)/.oracle: pyproject.toml | $(VENV)/.tests
	$(INSTALL) --no-build-isolation --editable ".[oracle]"
	@touch $@
