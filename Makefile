PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false
unexport PYTHONDONTWRITEBYTECODE  # or every process would compile all its libraries again

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

.PHONY: help run run-full site test test-dear test-without test-all test-long emulator real bench lock wheel lint lab format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

EXECUTED := build/notebooks

run: .venv/ready  ## execute all notebooks, print the comparison, build build/site/index.html (5 minutes)
	$(BIN)/python -m workbench notebooks --at-once 2
	$(BIN)/python -m workbench compare
	$(MAKE) site

run-full: .venv/ready  ## the same with three seeds, searched rates and nothing from a file (an hour)
	WORKBENCH_PREDICTIONS=live $(BIN)/python -m workbench notebooks -p seeds 3
	$(BIN)/python -m workbench compare
	$(MAKE) site EXECUTED=build/notebooks-own

site: .venv/ready  ## pages of the notebooks as they were executed, the results and the manual: build/site/index.html
	$(BIN)/python -m sphinx -q -c docs -d build/doctrees -D executed_notebooks=$(EXECUTED) . build/site
	@echo "site: build/site/index.html"

test: .venv/ready lint  ## linters, types, import layers, and the tests that a fresh clone can run (5 to 11 minutes)
	$(BIN)/python tests/newcomer.py $(PYTEST) -m "(smoke or not dear) and not long" --cpu-budget 15

test-dear: .venv/ready  ## what `make test` leaves out: emulated GPUs, ranks, kernels, pages, all scripts, all models
	$(PYTEST) -m "dear and not smoke and not long"

test-without: .venv/ready  ## the same without all that a test may need: each is skipped with its reason, and none fails
	$(BIN)/python tests/newcomer.py $(PYTEST) -m "dear and not smoke and not long" -rs

test-all: .venv/ready lint  ## both, which is what CI runs
	$(PYTEST)

emulator: .venv/ready  ## set up the emulated GPU: fetch PyTorch's CUDA build (527 MB), build the stubs
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check ziglang==0.17.1
	$(BIN)/python -m workbench emulate --set-up

real: .venv/ready  ## repeat measurements that others published on the emulated GPU, equal or not (12 minutes)
	$(BIN)/python tools/against_real.py

test-long: .venv/ready  ## kills, soak and texts of 1 GB, with their figures printed (about 25 minutes)
	$(BIN)/python -m pytest -m long -s --durations=0

bench: .venv/ready  ## how fast predictions are, on a quiet machine
	$(BIN)/python tests/benchmarks/prediction.py

lock: .venv/ready  ## write the hashed lock files anew, after a change of requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check uv==0.13.9
	$(BIN)/python tools/lock.py

wheel: .venv/ready  ## build the wheel, install it into an empty environment and use it there (minutes, downloads)
	$(BIN)/python tools/try_wheel.py

lint: .venv/ready  ## ruff, mypy, import layers, the repository's own files, notebooks without outputs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/lint.py
	$(BIN)/python tests/voice.py
	$(BIN)/nbstripout --keep-id --verify notebooks/*.ipynb

lab: .venv/ready  ## open JupyterLab with the playground; the lessons stand beside it
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/playground.ipynb

format: .venv/ready  ## tidy code and notebooks
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/nbstripout --keep-id notebooks/*.ipynb

clean:  ## remove what was built; runs and .venv stay
	rm -rf build .mypy_cache .pytest_cache .ruff_cache

.venv/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --requirement requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import workbench.training.trainer'  # compiled here, once, what every process imports
	touch $@
