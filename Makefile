# make demo | test | bench | fmt: each sets up what it needs in .venv first; a second run finds it done.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin

CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
BENCHES = $(sort $(wildcard bench/bench_*.py))

.PHONY: demo test bench fmt check-fmt build setup hooks clean help

help:
	@sed -n 's/^# make/make/p' Makefile

demo: build
	$(PY) -m bench.demo

test: build check-fmt
	$(PY) -m pytest -q -n auto --maxprocesses 8 --dist loadfile tests

bench: build
	@set -e; for file in $(BENCHES); do echo "== $$file"; $(PY) $$file; done

fmt: $(VENV)/.ready
	$(BIN)/ruff check -q --fix .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $(CXX_FILES)

check-fmt: $(VENV)/.ready
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

build: $(VENV)/.ready $(VENV)/.nvcc
	$(PY) setup.py -q build_ext --inplace
	@[ -x $(BIN)/pagedkern-engine ] || $(PY) -m pip install -q --no-deps --no-build-isolation -e .

setup: $(VENV)/.ready $(VENV)/.nvcc

hooks: $(VENV)/.ready
	$(BIN)/pre-commit install

clean:
	rm -rf build dist *.egg-info pagedkern/*.so pagedkern/*.a

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "pagedkern needs Python >= 3.10: make PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no venv in $(PYTHON) (Debian: apt install python3-venv)"; exit 1; }

$(VENV)/.ready: .ci/requirements.txt | $(PY)
	$(PY) -m pip install -q -r .ci/requirements.txt
	@touch $@

# nvcc from PyPI where the system has none and the CUDA part is not switched off.
$(VENV)/.nvcc: .ci/requirements-nvcc.txt | $(VENV)/.ready
	@if [ "$(PAGEDKERN_CUDA)" = 0 ]; then \
	  echo "PAGEDKERN_CUDA=0: no nvcc is installed"; \
	elif command -v nvcc || [ -x "$(CUDA_HOME)/bin/nvcc" ] || [ -x /usr/local/cuda/bin/nvcc ]; then \
	  touch $@; \
	else \
	  echo "no nvcc here: installing it from PyPI"; \
	  $(PY) -m pip install -q -r .ci/requirements-nvcc.txt && touch $@; \
	fi
