# Each target sets itself up: the first one builds .venv, later ones reuse it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: bench demo examples test lint format clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.bench: .venv/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

bench: .venv/.bench
	$(BIN)/python -m benchmarks

demo: .venv/.installed
	$(BIN)/laplace-debias demo

examples: .venv/.installed
	for example in examples/*.py; do echo "== $$example"; $(BIN)/python $$example || exit 1; done

test: .venv/.installed
	$(BIN)/python -m pytest -n auto

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv results build *.egg-info
