# Two commands: `make run` (the quickstart) and `make test`. Everything else serves them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test check install clean docs

run: install
	@$(BIN)/vramfarm-runner simulate --state .quickstart/vramfarm --run configs/quickstart.yaml

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m runner.docs --check
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

docs: install
	$(BIN)/python -m runner.docs

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,simulate,dev]' -c constraints.txt
	@touch $(STAMP)

clean:
	rm -rf .quickstart build dist .mypy_cache .ruff_cache .hypothesis
