# make lab, make test: each sets up what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON))
DEVICE ?= cuda
WITHOUT := and not thorough
UNIT := $(BIN)/pytest --numprocesses auto --maxprocesses 5 --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED := 0
unexport PYTHONDONTWRITEBYTECODE  # every process that a test starts would compile all of it again

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

lab: .venv/.ready$(if $(GPU),-gpu)  ## set up, then open JupyterLab on the course; GPU=1: with JAX for NVIDIA
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

test:  ## set up, then lint, types, unit tests, doctests, notebooks: about 11 minutes on two cores
test-all:  ## the same, and in more sizes, precisions and processes
test-all: export XLA_FLAGS :=
test-all: WITHOUT :=
test-all: UNIT += --hypothesis-profile pipelab
test test-all: .venv/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy & $(BIN)/pytest -m 'timed $(WITHOUT)' $$(grep -rl mark.timed tests --include='test_*.py') \
		&& $(UNIT) --nbval -m 'not timed $(WITHOUT)' && wait $$!

check: .venv/.ready  ## after a small change: lint, types, the quick tests of the first rooms
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(UNIT) -m 'not timed and not thorough' tests/table tests/schedules tests/predict tests/plot tests/house/test_layers.py

fuzz: .venv/.ready  ## 10,000 random tables through the executor, and 1,000 random runs, each against one device
	PIPELAB_FUZZ=10000 $(BIN)/pytest tests/runtime/test_run.py -k random_tables
	$(BIN)/python -m tests.runtime.verdict.fuzz 1000

mutants: .venv/.ready  ## one wrong token at a time in table/, predict/ and bounds: do their own tests see it?
	$(BIN)/python tests/house/mutants.py

notebooks: .venv/.ready  ## run the lectures and store their outputs
	TQDM_DISABLE=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

bench: .venv/.ready  ## measure and rewrite the pages in benchmarks/
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/seen.py
	$(BIN)/python benchmarks/checked.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/job.py
	$(BIN)/python benchmarks/jax_pipelines.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/traces.py
	$(BIN)/python benchmarks/published.py

gpu: $(if $(filter $(GPU_PYTHON),$(BIN)/python),.venv/.ready$(if $(filter cuda,$(DEVICE)),-gpu))  ## what only a GPU shows, cheapest first; LIMIT=540 ends it then, DEVICE=cpu rehearses it, BEGIN=JAX goes on there, PYTHON=python3 needs no .venv
	PYTHONPATH=$(CURDIR):$(CURDIR)/benchmarks $(GPU_PYTHON) -m gpu.report --device $(DEVICE) $(if $(BEGIN),--begin '$(BEGIN)') $(if $(LIMIT),--seconds $(LIMIT))

site: .venv/.ready  ## the course as web pages, in build/site: open build/site/index.html
	$(BIN)/sphinx-build --fresh-env --write-all -W -q -c docs -d build/doctrees . build/site

handout: .venv/.ready  ## the lectures without outputs and solutions, for a class, in build/handout
	rm -rf build/handout && mkdir -p build/handout && cp -R notebooks images build/handout
	$(BIN)/jupyter nbconvert --log-level=ERROR --clear-output --inplace build/handout/notebooks/*.ipynb
	sed -i.bak '/<summary>Solution/,/<\/details>/s/".*"/""/' build/handout/notebooks/*.ipynb
	rm build/handout/notebooks/*.bak

images: .venv/.ready  ## draw the pictures in images/ again
	$(BIN)/python images/draw.py

clean:  ## remove the environment and caches
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pipelab needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[all]'
	@touch $@

.venv/.ready-gpu: .venv/.ready
	$(BIN)/pip install --quiet --editable '.[gpu]'
	@touch $@

.PHONY: help lab test test-all check fuzz mutants notebooks bench gpu site handout images clean
