VENV := .venv
PY := $(VENV)/bin/python

.PHONY: build
build:
	$(PY) setup.py -q build_ext --inplace
