# Everything a fresh machine needs is made on first use; the second time is quick.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
export MASW_HOME ?= $(CURDIR)/.masw

.PHONY: help setup demo demo-compare test check verify clean

help:           ## show the targets
	@grep -E '^[a-z-]+: .*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

setup: $(READY)  ## virtual environment with pinned dependencies, and the embedded pair
	$(VENV)/bin/python -m masw.build.embedded_pair

demo: $(READY)   ## summarise a real document through Triton, proven equal to plain decoding
	$(VENV)/bin/python -m masw.build.demo

demo-compare: $(READY)  ## the demo, and the same answer drafted from other memories
	$(VENV)/bin/python -m masw.build.demo --compare

test: setup check  ## the whole test suite, the real Triton server included
	$(VENV)/bin/python -m pytest -m "not verify"

verify: setup    ## long equality runs: 20 prompts on the embedded model
	$(VENV)/bin/python -m pytest -m verify

check: $(READY)  ## lint and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:          ## remove everything that was made here
	rm -rf $(VENV) .masw .setuptools *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13) and "Python 3.11 or 3.12 is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,dev]'
	touch $(READY)
