# Everything happens in .venv, which each target sets up as far as it needs; a second call does no set-up and needs no
# network. Asked of the machine: Python >= 3.10, a C compiler with the C library's headers, make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools reminds at length that an editable installation lies in the working directory; that is its purpose here.
INSTALL := $(BIN)/python -W ignore:Editable -m pip install --quiet
C_SOURCES := setup.py $(wildcard hostcache/*.[ch] staging/*.[ch] npu/*.[ch] */_*_build.py)

# rknn-toolkit2 has wheels for these only, and wants older packages than ours: an environment of its own, 660 MB.
VENDOR := .venv-rknn
VENDOR_PYTHON ?= $(shell for python in python3.12 python3.11 python3.10; do $$python -c '' 2>&- && echo $$python && break; done)

.PHONY: demo test oracle lint types docs jobs sweep fuzz test-vendor test-udev test-vm test-arm64 sanitize .venv-rknn clean

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

# What takes minutes: the wheel in clean environments, and longer runs.
jobs: $(VENV)/.tests
	$(BIN)/python -m pytest -m "wheel or long" --ignore tests/mutation

# Seeded faults, each of which some test must notice, on two cores.
sweep: $(VENV)/.tests
	$(BIN)/python -m pytest -m long tests/mutation

# Against the vendor's compiler and simulator.
test-vendor: $(VENV)/.tests .venv-rknn
	ROCKPAGE_RKNN_PYTHON=$(VENDOR)/bin/python $(BIN)/python -m pytest -m vendor

# Against the real udev library, which umockdev shows made-up boards.
test-udev: $(VENV)/.tests
	@command -v umockdev-run > /dev/null \
	  || { test "$$(id -u)" = 0 && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends umockdev; } \
	  || { echo "test-udev needs umockdev: sudo apt-get install umockdev"; exit 1; }
	$(BIN)/python -m pytest -m umockdev tests/board

# Against real CMA, DMA heaps, udmabuf and memory pressure: in a virtual machine, whose kernel is built once and kept in
# the user's cache.
test-vm: $(VENV)/.tests
	@$(BIN)/python -m tests.board.vm

# The vendor's Python runtime over a stub of its library, and our C parts: on emulated arm64, whose packages are fetched
# once and kept in the user's cache.
test-arm64: $(VENV)/.tests
	@$(BIN)/python -m tests.board.arm64

# The C parts' tests, with AddressSanitizer and UndefinedBehaviorSanitizer built in.
sanitize: $(VENV)/.tests
	@$(BIN)/python -m tests.sanitize

# Hostile files, templates and requests, for ten minutes; FUZZ_SECONDS=30 for a look, FUZZ_SEED=... for the same again.
fuzz: $(VENV)/.tests
	$(BIN)/python -m pytest -s -m fuzz tests/fuzz

clean:
	rm -rf $(VENV) $(VENDOR) build dist *.egg-info hostcache/*.so staging/*.so npu/*.so

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

.venv-rknn: $(VENDOR)/.made

$(VENDOR)/.made: npu/rknn_requirements.txt
	@test -n "$(VENDOR_PYTHON)" || { echo "rknn-toolkit2 needs Python 3.10 to 3.12: make VENDOR_PYTHON=/path/to/python"; exit 1; }
	@$(VENDOR_PYTHON) bootstrap.py $(VENDOR)
	$(VENDOR)/bin/python -m pip install --quiet --no-deps -r npu/rknn_requirements.txt
	@touch $@
