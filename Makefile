# Every target makes the .venv that it needs. Choose another Python with `make PYTHON=python3.13`.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
# Without a GPU the tests need neither the kernels (minutes of nvcc) nor a CUDA build of torch
# (gigabytes); the CPU index is asked once, and where it is out of reach pip goes on without it.
export FUSED_ROPE_XATTN_CUDA ?= $(if $(GPU),auto,0)
CPU_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_INDEX := $(if $(GPU),,$(CPU_TORCH_INDEX:%=--extra-index-url % --retries 1 --timeout 15))

SOURCES := setup.py $(filter-out %__pycache__,$(wildcard kernels/*))
CXX_FILES := $(foreach ext,cpp cu cuh h,$(wildcard kernels/*.$(ext) tests/ext/*.$(ext)))
BUILT := .venv/built-$(FUSED_ROPE_XATTN_CUDA)

.PHONY: help
help:  ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 24

.PHONY: setup
setup: $(BUILT)  ## Make .venv, with everything that the targets below need

.PHONY: demo
demo: $(BUILT)  ## A guided tour that runs anywhere
	$(BIN)/python -m fused_rope_xattn demo

.PHONY: test
test: $(BUILT)  ## All tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist loadfile

.PHONY: slow-test
slow-test: $(BUILT)  ## Tests that build wheels, start processes or compile at length; SLOW: which files
	$(BIN)/python -m pytest -m "slow and not gpu" -n 2 --dist loadfile $(SLOW)

.PHONY: gpu-test
gpu-test:  ## Tests on the GPU, with the kernels built for it
	$(MAKE) FUSED_ROPE_XATTN_CUDA=require .venv/built-require
	$(BIN)/python -m pytest -m gpu --require-gpu

.PHONY: lint
lint: $(BUILT)  ## What CI demands: format, style, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python .ci/check_workflows.py

.PHONY: format
format: $(BUILT)  ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: docs
docs: $(BUILT)  ## Build the documentation into build/docs, offline; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

.PHONY: serve-docs
serve-docs: $(BUILT)  ## Show the documentation on this machine, rebuilt as it is edited
	$(BIN)/python -m mkdocs serve

.PHONY: wheel
wheel: $(BUILT)  ## Build the CUDA wheel from scratch into dist/ and check it; needs nvcc, no GPU
	rm -rf build dist && mkdir build
	FUSED_ROPE_XATTN_CUDA=require $(PIP) wheel -v --no-build-isolation --no-deps -w dist . \
	  2>&1 | tee build/wheel.log
	$(BIN)/python .ci/check_wheel.py dist/*.whl --build-log build/wheel.log

.PHONY: sdist
sdist: $(BUILT)  ## Write the source archive into dist/
	$(BIN)/python setup.py -q sdist

.PHONY: audit
audit: $(BUILT)  ## Check what is in dist/: metadata, symbols, ABI of torch and Python, glibc
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/check_wheel.py dist/*.whl
	for wheel in dist/*.whl; do $(BIN)/auditwheel show "$$wheel"; done

.PHONY: try-wheel
PAIRS ?= $(PYTHON):torch
try-wheel:  ## Test the wheel in dist/ elsewhere: PAIRS="python3.10:torch==2.10.* ..."
	$(PYTHON) .ci/try_wheel.py dist/*.whl $(PAIRS)

.PHONY: try-nightly
NIGHTLY_INDEX ?= https://download.pytorch.org/whl/nightly/cpu
try-nightly:  ## Test the wheel in dist/ against the nightly build of torch
	$(PYTHON) .ci/try_wheel.py dist/*.whl $(PYTHON):torch \
	  --pip="--pre --extra-index-url $(NIGHTLY_INDEX)"

.PHONY: install-matrix
install-matrix: $(BUILT)  ## Install the sources in every way, and table what each gives
	$(BIN)/python .ci/install_matrix.py

.PHONY: cpu-build
cpu-build: $(BUILT)  ## Build without nvcc, as on a machine that has none, and without a compiler
	$(BIN)/python .ci/install_matrix.py --only "no nvcc" "no compiler"

.PHONY: check-workflows
check-workflows:  ## The workflows: actions pinned, steps that run anywhere
	$(PYTHON) .ci/check_workflows.py

.venv/torch: pyproject.toml tests/constraints.txt
	@echo "Preparing .venv; this takes minutes, once"
	$(PYTHON) -m venv .venv
	$(PIP) install -q -c tests/constraints.txt --no-deps $(TORCH_INDEX) torch
	$(PIP) install -q -c tests/constraints.txt torch 'setuptools>=77.0.3' wheel ninja
	touch $@

$(BUILT): .venv/torch $(SOURCES)
	rm -f .venv/built-*
	$(PIP) install -q -c tests/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
