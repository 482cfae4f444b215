# `make demo` trains something real, `make test` checks everything that is quick to check, `make docs` builds the pages and
# the reference of the package, `make wheel` packs the package.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Two stamps of one environment: with what the demo needs, and with what development needs, which includes it.
DEMO_READY = $(VENV)/.demo-ready
READY = $(VENV)/.ready
# Modules are compiled when they are first imported, or all at once on both cores. pip would do it on one.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Two test processes on two cores: threads that wait by spinning would starve each other.
export OMP_WAIT_POLICY = PASSIVE

.PHONY: demo test test-all check docs wheel bench results gallery clean
.DELETE_ON_ERROR:
.NOTPARALLEL:  # Two installations into one environment would disturb each other.

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(DEMO_READY): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[cli]'
	touch $(DEMO_READY)

# One call for everything, so that nothing is installed twice. Tests turn warnings into errors, also those of a compiler
# about packages of others, so that these are compiled before. Some have files for a later Python, which cannot be.
$(READY): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 2 $(VENV)/lib || true
	touch $(DEMO_READY) $(READY)

demo: $(DEMO_READY)
	$(BIN)/fedquilt run

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2

test: check
	$(BIN)/pytest -n 2

test-all: check
	$(BIN)/pytest -n 2 -m 'not gpu'

# The site is in build/docs. A broken link or an unknown name is an error. Nothing is downloaded.
docs: $(READY)
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs . build/docs

# setuptools would also pack what an older build has left behind.
wheel: $(BIN)/pip
	rm -rf build/lib build/bdist.*
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	rm -rf build/lib build/bdist.*

# About ten minutes on two idle cores. Other frameworks are measured where they are installed: pip install -e '.[bench]'.
bench: $(READY)
	$(BIN)/python bench/stitch.py
	$(BIN)/python bench/layouts.py
	$(BIN)/python bench/rounds.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/customize.py
	$(BIN)/python bench/growth.py
	$(BIN)/python bench/distillation.py
	$(BIN)/python bench/supernet.py
	$(BIN)/python bench/inference.py
	$(BIN)/python bench/studies.py
	$(BIN)/python bench/report.py
	$(BIN)/python bench/flower.py
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(BIN)/python bench/gpu.py && $(BIN)/python bench/memory.py && $(BIN)/python bench/fedrescue.py && $(BIN)/python bench/splitmix.py; fi

# Write the tables and draw the curves of docs/results from the stored results.
results: $(READY)
	$(BIN)/python tools/results.py

# Make the pictures of docs/gallery from runs, which are kept in build/gallery.
gallery: $(READY)
	$(BIN)/python tools/gallery.py

clean:
	rm -rf $(VENV) build
