# Two commands on a fresh machine: `make run` and `make test`. Both build .venv first; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
CHROMIUM ?= chromium
MINUTES ?= 10
export CHROMIUM

.DEFAULT_GOAL := help
.PHONY: help setup package browser run test check format faults bench peers docs notebooks pictures methods-table calibration-table epsilon-table updates-table transfer-table one-exchange-table long-tail-table forecast-figure inversion-study gallery test-all lock clean

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

browser: ## Install Chromium, which the tests of the report page drive, where it is missing (Debian)
	@command -v "$(CHROMIUM)" > /dev/null || { \
		test "$(CHROMIUM)" = chromium && command -v apt-get > /dev/null && \
		echo "Installing Chromium: the tests of the report page drive it." && \
		root=$$(test "$$(id -u)" -eq 0 || command -v sudo || true) && $$root apt-get update -qq && \
		$$root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium > /dev/null && \
		command -v chromium > /dev/null; \
	} || { echo "There is no $(CHROMIUM): apt-get install chromium, or say make test CHROMIUM=/path/to/chrome"; exit 2; }

run: $(READY) ## Train a skewed federation on the embedded digits, calibrate it, make its report
	@$(BIN)/unskew run recipes/digits.toml --report

check: $(READY) ## Format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check browser ## Every check, then every test that takes less than ten seconds
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not heavy"

test-all: check browser ## Also the heavy tests; UNSKEW_TEST_DATA names a folder with the real image sets
	$(BIN)/python -m pytest -n 2

faults: $(READY) ## Break things on purpose, for MINUTES (10): is a wrong result ever silent? docs/explanation/reliability.md
	$(BIN)/python -m faults --minutes $(MINUTES)

bench: $(READY) ## Speed, side by side in one run; UNSKEW_DATA names a folder with CIFAR-10
	$(BIN)/python benchmarks/run.py --out benchmarks/results.md

BLAZEFL_PYTHON := $(shell command -v python3.14t || command -v python3.14)

.venv-peers/ready: benchmarks/peers.txt
	@echo "Building .venv-peers: pfl-research, Flower's simulator and PyTorch take some minutes."
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	@touch .venv-peers/ready

.venv-blazefl/ready: # pfl-research needs a Python below 3.13, BlazeFL 3.14
	@$(BLAZEFL_PYTHON) -m venv .venv-blazefl
	@.venv-blazefl/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy blazefl==3.0.0
	@touch .venv-blazefl/ready

peers: $(READY) .venv-peers/ready $(if $(BLAZEFL_PYTHON),.venv-blazefl/ready) ## Rounds of pfl-research, Flower, BlazeFL and a plain loop beside ours, in turn; builds environments for them
	$(BIN)/python benchmarks/peers.py

docs: $(READY) ## Build the documentation site into site/, strictly and without the network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(READY) ## Run the notebooks of docs again and store their outputs
	$(BIN)/python docs/generate/notebooks.py

pictures: $(READY) ## Make the pictures of README and docs from real runs
	$(BIN)/python docs/generate/pictures.py

methods-table: $(READY) ## Measure every method on CIFAR-10 (UNSKEW_DATA) and write docs/reference/methods/measured.md: hours
	$(BIN)/python docs/generate/methods_table.py

calibration-table: $(READY) ## Measure every calibration on CIFAR-10 (UNSKEW_DATA) and write docs/how-to/calibration.md: hours
	$(BIN)/python docs/generate/calibration_table.py

transfer-table: $(READY) ## Fine-tune an ImageNet network on CIFAR-100 (UNSKEW_DATA) and write docs/how-to/transfer.md: hours
	$(BIN)/python docs/generate/transfer_table.py

one-exchange-table: $(READY) ## Measure one exchange of statistics against rounds and write docs/how-to/one-exchange.md: minutes
	$(BIN)/python docs/generate/one_exchange_table.py

long-tail-table: $(READY) ## Measure calibrations on long tails (UNSKEW_DATA) and write docs/how-to/long-tail.md: half an hour
	$(BIN)/python docs/generate/long_tail_table.py

forecast-figure: $(READY) ## Measure the forecast of calibrations (CIFAR-10 too with UNSKEW_DATA) and write docs/how-to/forecast.svg: minutes
	$(BIN)/python docs/generate/forecast_figure.py

epsilon-table: $(READY) ## Measure calibrations under differential privacy over ten draws and write docs/explanation/privacy.md: minutes
	$(BIN)/python docs/generate/epsilon_table.py

updates-table: $(READY) ## Measure training under private updates by the noise and write docs/explanation/privacy.md: minutes
	$(BIN)/python docs/generate/updates_table.py

inversion-study: $(READY) ## Reconstruct images from features (UNSKEW_DATA, scikit-image) and write docs/explanation/inversion.md
	$(BIN)/python docs/generate/inversion_study.py

gallery: $(READY) ## Make docs/explanation/gallery.md from real runs: CIFAR-10 (UNSKEW_DATA, an hour) or digits (minutes)
	$(BIN)/python docs/generate/gallery.py

package: $(READY) ## Build wheel and sdist into dist/; install each into a clean environment, use it outside the checkout
	rm -rf dist
	$(BIN)/python -m hatchling build
	for made in dist/*.whl dist/*.tar.gz; do .ci/package $(PYTHON) $$made || exit 1; done

format: $(READY) ## Put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## Pin the newest versions that pyproject.toml allows
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/pip install --quiet "torch==2.13.0" ".[dev]"
	$(VENV)/lock/bin/pip freeze --all --exclude unskew --exclude pip | sed 's/+cpu$$//' > requirements.lock

clean: ## Remove the virtual environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
