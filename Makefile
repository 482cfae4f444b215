# Two commands: `make demo` trains something real, `make test` checks everything that is quick to check.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
READY = $(VENV)/.ready
# Two test processes on two cores: threads that wait by spinning would starve each other.
export OMP_WAIT_POLICY = PASSIVE

.PHONY: demo test test-all check bench results clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $(READY)

demo: $(READY)
	$(BIN)/fedquilt run

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n 2

test-all: check
	$(BIN)/pytest -n 2 -m 'not gpu'

# About ten minutes on two idle cores. Other frameworks are measured where they are installed: pip install -e '.[bench]'.
bench: $(READY)
	$(BIN)/python bench/stitch.py
	$(BIN)/python bench/layouts.py
	$(BIN)/python bench/rounds.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/customise.py
	$(BIN)/python bench/growth.py
	$(BIN)/python bench/distillation.py
	$(BIN)/python bench/supernet.py
	$(BIN)/python bench/studies.py
	$(BIN)/python bench/flower.py
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(BIN)/python bench/gpu.py && $(BIN)/python bench/memory.py && $(BIN)/python bench/fedrescue.py && $(BIN)/python bench/splitmix.py; fi

# Write the tables of docs/results from the stored results.
results: $(READY)
	$(BIN)/python tools/results.py

clean:
	rm -rf $(VENV)
