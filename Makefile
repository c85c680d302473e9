# Everything a fresh machine with Python and a C++ compiler needs:
#
#   make demo     sets up .venv, builds, trains a small model through fccl and through Gloo
#   make test     the same set-up, then all tests (SLOW=1: the slow ones too)
#   make cuda     builds with the CUDA kernels in .venv-cuda, and runs the Python tests there (needs nvcc, no GPU)
#   make lint     ruff, clang-format, mypy
#   make conformance   PyTorch's own distributed test-suite, with 2, 3 and 4 ranks
#   make build    sets up .venv and builds
#   make bench    a short benchmark against Gloo and memcpy
#   make clean    removes build results; `make distclean` the virtual environment too
#
# Variables:
#   TORCH=torch==2.13.0   what pip installs as torch (2.11 to 2.15); for `make cuda` torch==2.14.1, and of nvcc's CUDA
#   PYTHON=python3        the interpreter that makes the virtual environment (3.10 to 3.13)
#   VENV=.venv            where it goes; for `make cuda` .venv-cuda
#   CUDA=AUTO             whether the CUDA kernels are built: AUTO (if nvcc and torch allow), ON or OFF; `make cuda`: ON
#   CUDA_ARCHITECTURES=90 for which GPUs, e.g. for a quicker build; empty: all that fccl supports
#   WERROR=ON             warnings in fccl's own sources are errors (CI)
#   JOBS=N                compile jobs, and test workers
#   PYTEST_FLAGS=...      passed to pytest, e.g. PYTEST_FLAGS='-k all_reduce'
#   RANKS="2 3 4"         numbers of ranks for `make conformance`
#   DEMO_FLAGS=...        passed to `fccl demo`, e.g. DEMO_FLAGS='--steps 50'

# `make cuda` is the ordinary set-up and the ordinary tests with other defaults, in an environment of its own.
ifneq ($(filter cuda,$(MAKECMDGOALS)),)
  ifneq ($(filter-out cuda,$(MAKECMDGOALS)),)
    $(error `make cuda` works in another environment than the other targets: call make once for each)
  endif
  TORCH ?= torch==2.14.1
  VENV ?= .venv-cuda
  CUDA ?= ON
endif
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
CUDA ?= AUTO
CUDA_ARCHITECTURES ?=
WERROR ?= OFF
JOBS ?= 2
PYTEST_FLAGS ?=
RANKS ?= 2 3 4
DEMO_FLAGS ?=
SLOW ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PY := $(VENV)/bin/python
# A stamp is touched by the last command of its rule, so a step that failed is done again.
STAMPS := $(VENV)/stamps
# A change of TORCH is a change of the file's name.
TORCH_STAMP := $(STAMPS)/torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
# So is one of what is asked for in CUDA.
CUDA_STAMP := $(STAMPS)/cuda-$(shell printf '%s' '$(CUDA) $(CUDA_ARCHITECTURES)' | cksum | cut -d' ' -f1)
# scikit-build-core and ninja see to what has to be compiled; this decides whether to ask them. A new
# or removed Python file changes its folder.
SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc cmake -type f) \
           $(shell find python/fccl -type d -not -name __pycache__)
CPP_BUILD := build/cpp
PIP := $(PY) -m pip --disable-pip-version-check

# Keeps the torch that is installed, whatever else a requirement might pull in.
CONSTRAINTS := $(STAMPS)/constraints.txt
# A build folder for each torch: two environments of one Python do not undo each other's work in it.
BUILD_DIR = build/{wheel_tag}-torch-$$($(PY) -c 'from importlib.metadata import version; print(version("torch"))')
SETTINGS = --config-settings=build-dir="$(BUILD_DIR)" --config-settings=cmake.define.FCCL_WERROR=$(WERROR) \
           --config-settings=cmake.define.FCCL_CUDA=$(CUDA) \
           --config-settings=cmake.define.FCCL_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)"
INSTALL = PATH="$(abspath $(VENV))/bin:$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
          $(PIP) install --no-build-isolation -c $(CONSTRAINTS) $(SETTINGS)

.PHONY: help build cuda demo bench test test-cpp test-python test-wheel conformance lint format clean distclean gtest

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# ---- set-up ----

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else \
	  f"fccl needs Python 3.10 to 3.13, and $(PYTHON) is {v[0]}.{v[1]}: make ... PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made in $(VENV)." \
	  "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sysconfig, os, sys; p = sysconfig.get_path("include") + "/Python.h"; \
	  sys.exit(0 if os.path.exists(p) else f"{p} is missing: install the headers of $(PYTHON) (python3-dev)")'
	-$(PIP) install --upgrade pip
	mkdir -p $(STAMPS)
	touch $@

$(TORCH_STAMP): $(STAMPS)/venv
	$(PIP) install '$(TORCH)' numpy ninja 'cmake>=3.25' 'scikit-build-core>=0.10'
	$(PY) -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' > $(CONSTRAINTS).new
	mv $(CONSTRAINTS).new $(CONSTRAINTS)
	rm -f $(STAMPS)/torch-* $(STAMPS)/installed $(STAMPS)/lint
	touch $@

$(CUDA_STAMP): $(STAMPS)/venv
	rm -f $(STAMPS)/cuda-* $(STAMPS)/installed
	touch $@

$(STAMPS)/installed: $(TORCH_STAMP) $(CUDA_STAMP) $(SOURCES)
	@command -v $${CXX:-c++} >/dev/null || { echo "A C++20 compiler is missing (g++ 11 or clang 14, or later)." \
	  "On Debian and Ubuntu: apt-get install g++" >&2; exit 1; }
	$(INSTALL) -e '.[test]'
	$(PY) -c 'import fccl._extension as e; print("built:", e.load().build_info())'
	touch $@

$(STAMPS)/lint: $(STAMPS)/installed
	$(INSTALL) -e '.[lint]'
	touch $@

# ---- uses ----

build: $(STAMPS)/installed

demo: $(STAMPS)/installed
	$(PY) -m fccl demo $(DEMO_FLAGS)

bench: $(STAMPS)/installed
	$(PY) -m fccl bench all_reduce --ranks 2 --begin 4 --end 64M --factor 4 --compare gloo,memcpy

# ---- tests ----

test: test-cpp test-python test-wheel

# GoogleTest: what is there, else the distribution's where we may install it, else CMake fetches it.
gtest:
	@if ! printf '#include <gtest/gtest.h>\n' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1 \
	    && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get install -y libgtest-dev libgmock-dev \
	    || { apt-get update && apt-get install -y libgtest-dev libgmock-dev; } \
	    || echo "GoogleTest could not be installed with apt-get; CMake will try to fetch it." >&2; \
	fi

test-cpp: $(TORCH_STAMP) gtest
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S . -B $(CPP_BUILD) -G Ninja \
	  -DFCCL_TESTS=ON -DFCCL_PYTHON=OFF -DFCCL_WERROR=$(WERROR)
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build $(CPP_BUILD) -j $(JOBS)
	PATH="$(abspath $(VENV))/bin:$$PATH" ctest --test-dir $(CPP_BUILD) --output-on-failure --no-tests=error \
	  --timeout 300

test-python: $(STAMPS)/installed
	$(PY) -m pytest -n $(JOBS) $(if $(SLOW),,-m 'not slow') $(PYTEST_FLAGS)

# What can be known without a GPU: it links, loads without a driver, has the kernels in it, and all else works as
# before. The kernels' own tests are C++ tests (`make test`) and need no torch.
cuda: $(STAMPS)/installed
	$(PY) -c 'import fccl._extension as e; m = e.load(); n = m.cuda_kernel_count(); \
	  print(n, "CUDA kernels for", m.build_info()["cuda_architectures"]); assert n > 0'
	$(PY) -m pytest -n $(JOBS) $(if $(SLOW),,-m 'not slow') $(PYTEST_FLAGS)

# A wheel, installed in an environment of its own that sees the first one's torch, works; and without
# its compiled module it says what is wrong.
test-wheel: $(STAMPS)/installed
	PYTHON="$(PY)" JOBS=$(JOBS) tests/packaging/check_wheel $(SETTINGS)

# docs/conformance.md. With 3 ranks and more also the tests of subgroups, which PyTorch skips below 8.
conformance: $(STAMPS)/installed
	for ranks in $(RANKS); do \
	  $(PY) tests/torch_suite/run_dist_suite.py --backend fccl --import fccl --claims gloo,mpi \
	    $$([ $$ranks -lt 3 ] || echo --small-world) --world-size $$ranks; \
	done

# ---- style ----

CXX_FILES = $(shell find csrc tests/cpp bench/gpu -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

lint: $(STAMPS)/lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/mypy

format: $(STAMPS)/lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs $(STAMPS)/installed $(STAMPS)/lint
	find python tests bench -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
