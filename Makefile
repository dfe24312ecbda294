# The two commands that matter: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
# one thread a process: small recurrent steps are far slower with more
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check format bench clean

demo: .venv/.installed
	$(BIN)/scoff reproduce adding --preset quick

test: .venv/.installed
	$(BIN)/python -m pytest -n 2 $(PYTEST)

check: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --warnings

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.installed
	$(BIN)/scoff bench

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is %d.%d; try make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv
