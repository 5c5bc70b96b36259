# Every command does all its set-up: Python and make are enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
LANES ?= tf1 tf2-keras2 tf2
# Test processes at a time: TensorFlow builds graphs in Python, on one core each.
TEST_PROCESSES ?= 2
# Tests that share what takes long to make run in one of them.
IN_PROCESSES = -n $(TEST_PROCESSES) --dist loadgroup
TRAIN_DIR ?= runs/generated
WORKERS_DIR ?= runs/generated-workers
BENCH_DIR ?= runs/benchmarks
COMPARE_DIR ?= runs/compare-generated
SEGMENTATION_DIR ?= runs/generated-segmentation
# With pyenv, the Pythons of all lanes have to be made visible.
PYENV_ALL := $(shell pyenv versions --bare 2>/dev/null | grep -E '^3\.(7|9|10|11|12|13)\.[0-9]+$$' | sort -t. -k2,2nr | paste -sd: -)
WITH_ALL_PYTHONS := $(if $(PYENV_ALL),PYENV_VERSION=$(PYENV_ALL))

.PHONY: train train-workers train-segmentation compare same-bits bench docs test test-laws test-graph test-sweeps test-all mutations \
	lint types package clean

train: $(VENV)/ready
	$(RUN) -m examples.cifar10.train --num-towers 2 --depth 14 --batch-size 64 --epochs 6 --train-dir $(TRAIN_DIR)

# The same on two workers of this machine, which begin again from the last checkpoint if one is killed.
train-workers: $(VENV)/ready
	$(RUN) -m towers.launch -n 2 --restarts 3 -m examples.cifar10.train --num-towers 1 --depth 14 --batch-size 64 \
		--epochs 6 --train-dir $(WORKERS_DIR)

# A small segmentation network on scenes made on the spot, two images a tower.
train-segmentation: $(VENV)/ready
	$(RUN) -m examples.segmentation.train --num-towers 2 --batch-size 4 --width 8 --crop 40 56 --epochs 20 \
		--train-dir $(SEGMENTATION_DIR)

# One batch as one tower, as synced towers and as unsynced ones, on images made on the spot: a table and a picture.
compare: $(VENV)/ready
	$(RUN) -m examples.cifar10.compare --depth 8 --batch-size 16 --images-a-tower 2 --seeds 2 --steps 300 --out $(COMPARE_DIR)

# The same towers on 1, 2 and 4 devices, and over a checkpoint: digests of all variables side by side.
same-bits: $(VENV)/ready
	$(RUN) -m examples.cifar10.same_bits

# Every benchmark in this lane; leave the machine alone meanwhile.
bench: $(VENV)/ready
	$(RUN) -m benchmarks --out $(BENCH_DIR)

# The documentation as a site in build/docs, without the network; every warning of it is an error. Its search needs a server.
docs: $(VENV)/docs
	$(RUN) docs/site/assemble.py build/pages
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build
	@echo "To read it: $(RUN) -m http.server --directory build/docs"

# Every promise once: of each test the first case, of quick tests four, and none that is marked laws.
test: $(VENV)/ready
	$(RUN) -m pytest $(IN_PROCESSES) -m "not laws and not sweep"

# All that this leaves out: the other cases, and long trainings.
test-laws: $(VENV)/ready
	$(RUN) -m pytest $(IN_PROCESSES) -m "laws and not sweep"

# The library once more under TensorFlow 2's resource variables and control flow.
test-graph: $(VENV)/ready
	TOWERS_TEST_BEHAVIOUR=graph $(RUN) -m pytest $(IN_PROCESSES) tests --ignore=tests/examples

# What the other tests take samples of, and what tests hold to be so of their own tables.
test-sweeps: $(VENV)/ready
	$(RUN) -m pytest $(IN_PROCESSES) -m sweep

# Every lane whose Python this machine has; nox says which it left out.
test-all: $(VENV)/nox
	$(WITH_ALL_PYTHONS) $(VENV)/bin/nox -s $(LANES) -- $(IN_PROCESSES)

# What the tests miss: 60 single-line changes of the library, and which of them `make test` finds.
mutations: $(VENV)/mutations
	$(RUN) -m pytest $(IN_PROCESSES) -m "not laws and not sweep" --cov=towers --cov=tf_syncbn --cov-context=test --cov-report=
	$(RUN) tools/mutations.py .coverage

lint: $(VENV)/ready
	$(RUN) -m flake8

# Signatures and how they are kept, by mypy; TensorFlow, which has few types, is not looked at.
types: $(VENV)/types
	$(VENV)/bin/mypy

# The wheel and the source archive in dist/, their metadata and what they hold.
package: $(VENV)/package
	rm -rf dist
	$(RUN) -m build --outdir dist .
	$(VENV)/bin/twine check --strict dist/*
	$(RUN) .ci/check_package.py dist

clean:
	rm -rf $(VENV) .nox .mypy_cache build dist *.egg-info

$(VENV)/ready: setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable ".[tensorflow,examples,test]"
	touch $@

# What reads the packages and does not import them needs no TensorFlow.
$(VENV)/docs $(VENV)/types $(VENV)/package: $(VENV)/%: setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable ".[$*]"
	touch $@

$(VENV)/nox: $(VENV)/ready
	$(RUN) -m pip install --quiet nox
	touch $@

$(VENV)/mutations: $(VENV)/ready
	$(RUN) -m pip install --quiet --editable ".[mutations]"
	touch $@
