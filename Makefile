# Two commands on a fresh machine: `make run` and `make test`. Both build .venv first; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.DEFAULT_GOAL := help
.PHONY: help setup run test check format bench pictures methods-table calibration-table test-all lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Unskew needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Building $(VENV): PyTorch is large, the first time takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

setup: $(READY) ## Build the virtual environment

run: $(READY) ## Train a skewed federation on the embedded digits
	@$(BIN)/unskew run recipes/digits.toml

check: $(READY) ## Format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check ## Every check, then every test that takes less than ten seconds
	$(BIN)/python -m pytest -n 2 -m "not heavy"

test-all: check ## Also the heavy tests; UNSKEW_TEST_DATA names a folder with the real image sets
	$(BIN)/python -m pytest -n 2

bench: $(READY) ## Speed, side by side in one run; UNSKEW_DATA names a folder with CIFAR-10
	$(BIN)/python benchmarks/run.py --out benchmarks/results.md

pictures: $(READY) ## Make the pictures of README and docs from real runs
	$(BIN)/python docs/make_pictures.py

methods-table: $(READY) ## Measure every method on CIFAR-10 (UNSKEW_DATA) and write docs/methods/measured.md: hours
	$(BIN)/python docs/make_methods_table.py

calibration-table: $(READY) ## Measure every calibration on CIFAR-10 (UNSKEW_DATA) and write docs/calibration.md: hours
	$(BIN)/python docs/make_calibration_table.py

format: $(READY) ## Put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## Pin the newest versions that pyproject.toml allows
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/pip install --quiet "torch==2.13.0" ".[dev]"
	$(VENV)/lock/bin/pip freeze --all --exclude unskew --exclude pip | sed 's/+cpu$$//' > requirements.lock

clean: ## Remove the virtual environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
