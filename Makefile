# Everything happens in .venv, which each target sets up as far as it needs; a second call does no set-up and needs no
# network. Asked of the machine: Python >= 3.10 with its headers and venv module, a C compiler, make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
C_SOURCES := setup.py $(wildcard hostcache/*.[ch] staging/*.[ch] npu/*.[ch] */_*_build.py)

.PHONY: demo test lint types jobs clean

demo: $(VENV)/.runs
	@$(BIN)/rockpage demo

test: $(VENV)/.tests
	$(BIN)/python -m pytest

lint: $(VENV)/.tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.tests
	$(BIN)/mypy

# What takes minutes: the wheel in clean environments, and longer sweeps.
jobs: $(VENV)/.tests
	$(BIN)/python -m pytest -m "wheel or long"

clean:
	rm -rf $(VENV) build dist *.egg-info hostcache/*.so staging/*.so npu/*.so

# All that is missing at once, so that one apt call mends it.
define PREFLIGHT
import importlib.util, os, shlex, shutil, sys, sysconfig

if sys.version_info < (3, 10):
    sys.exit(f"rockpage needs Python >= 3.10, {sys.executable} is {sys.version.split()[0]}: make PYTHON=/path/to/python3")
version = "{}.{}".format(*sys.version_info)
missing = []
compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc")[0]
if not shutil.which(compiler):
    missing.append((f"a C compiler ({compiler})", "gcc"))
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    missing.append(("Python.h", f"python{version}-dev"))
if not importlib.util.find_spec("ensurepip"):
    missing.append(("the ensurepip module", f"python{version}-venv"))
if missing:
    what, packages = zip(*missing)
    sys.exit(f"rockpage needs {', '.join(what)}: on Debian and Ubuntu, apt install {' '.join(packages)}")
endef
export PREFLIGHT

$(VENV)/.made:
	@$(PYTHON) -c "$$PREFLIGHT"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" "cffi>=1.17"
	@touch $@

# Editable: the Python files are used where they lie, the C modules are built beside them.
# Without isolation the build tools are those of .venv, so a rebuild needs no network.
$(VENV)/.runs: $(VENV)/.made pyproject.toml $(C_SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[model]"
	@touch $@

$(VENV)/.tests: pyproject.toml | $(VENV)/.runs
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	@touch $@
