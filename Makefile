# Two commands: `make run` (the quickstart) and `make test`. Everything else serves them.
#
#   PYTHON=python3.12                                      another interpreter, 3.11 or newer
#   TORCH_INDEX=URL                                        a package index of torch without CUDA: 2 GB less to download
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
# Tests mostly wait for processes: three at once keep two cores busy.
PYTEST = $(BIN)/python -m pytest -n 3 --dist worksteal
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The container tests use the engine that scripts/docker-engine.sh started, else any engine that answers.
ENGINE := eval "$$(scripts/docker-engine.sh env 2>/dev/null)";

.PHONY: run test test-failed check bench bench-transfer correctness scenarios chaos chaos-disks chaos-stores chaos-outputs chaos-exits test-old-torch install clean docs

run: install
	@$(BIN)/vramfarm-runner simulate --state .quickstart/vramfarm --run configs/quickstart.yaml

test: install
	@mkdir -p build && rm -rf build/pytest-cache build/test-exit
	@$(ENGINE) $(PYTEST) tests || { echo $$? >build/test-exit; exit 1; }

# Repeats what failed in the last `make test`, one test after the other. A real fault fails again; a time limit missed on a busy machine does not.
test-failed: install
	@$(ENGINE) $(BIN)/python -m pytest --last-failed --last-failed-no-failures none tests

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m runner.docs --check
	@$(ENGINE) $(PYTEST) tests

# The cost of a save and a restart, scaled down: two ranks on the processor, a quarter of an hour. On cards: benchmarks/gpu/run.sh
bench: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/checkpoint.py \
	  --dim 1024 --layers 8 --batch 1 --tokens 8 --optimizer fused --rounds 4 --limit-s 420 --save-limit-s 60 --out build/bench-out
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/gpu/restart.py build/bench-out --rounds 4 --limit-s 300 \
	  --size "--layers 6 --hidden 1280 --vocabulary 8192 --sequence 16 --per-card 1 --global-batch 2"
	@cat build/bench-out/checkpoint.md build/bench-out/restart.md

# Faults while a checkpoint is written or read, in our engine and in torch's DCP: make correctness ROUNDS=1000 JOBS=4, which plays so many rounds side by side
ROUNDS ?= 100
correctness: install
	$(BIN)/python benchmarks/correctness.py --rounds $(ROUNDS) --jobs $(JOBS) --out build/correctness

# Trainings made of features by chance, undisturbed and in pieces: make scenarios SEEDS=200, from SEED on, JOBS at once. A fault's folder stays in build/scenarios.
SEEDS ?= 20
scenarios: install
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tests/vramfarm/scenarios.py build/scenarios $(SEED) $(SEEDS) --jobs $(JOBS)

# Whole runs with torchrun and an S3 server, killed at every point of a save, and power losses (these need root and a loop device; without them the
# table says that power was not lost).
#   JOBS=N           rounds side by side: two per core
#   STORE=--store    strike at requests to the store
#   FAKE=--fake      without torch, which is three quarters of the time
#   SEED=N           seed of the first round
FAKE ?=
STORE ?=
JOBS ?= 2
SEED ?= 0
chaos: install
	@PYTHONPATH=. $(BIN)/python benchmarks/chaos/storm.py --rounds $(ROUNDS) --jobs $(JOBS) --seed $(SEED) $(FAKE) $(STORE); code=$$?; cat build/chaos/chaos.md; exit $$code

# Disks that are full, read-only, slow or failing below a whole run.
chaos-disks: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/disks.py

# chaos-stores: stores that are down, full, broken or silent beside a whole run; STAYS: for how many seconds one is down.
# chaos-outputs: many small outputs. chaos-exits: how long training takes to end while a save is under way.
STAYS ?= 1200
STORES ?=
chaos-stores: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/stores.py --stays-s $(STAYS) $(STORES)

chaos-outputs: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/outputs.py

chaos-exits: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/exits.py

# Uploads and downloads with our client and others, to an S3 server on this machine.
bench-transfer: install
	PYTHONPATH=. $(BIN)/python benchmarks/transfer.py

# The oldest torch that is supported, and the oldest whose own reader reads our shards. Installed from pip's index (6 GB each, with CUDA), or
#   make test-old-torch TORCH_INDEX=URL      of torch without CUDA
#   make test-old-torch VRAMFARM_OLD_TORCH=/one/bin/python:/other/bin/python      that have torch, numpy and safetensors
OLD_TORCH := 2.6.0 2.8.0
VRAMFARM_OLD_TORCH ?= $(subst $(eval) ,:,$(OLD_TORCH:%=$(CURDIR)/build/torch-%/bin/python))
test-old-torch: install $(if $(filter file,$(origin VRAMFARM_OLD_TORCH)),$(OLD_TORCH:%=build/torch-%/.installed))
	VRAMFARM_OLD_TORCH=$(VRAMFARM_OLD_TORCH) $(BIN)/python -m pytest -n 0 -rP tests/vramfarm/test_old_torch.py

build/torch-%/.installed:
	@echo "make: installing torch $* into build/torch-$*: minutes" >&2
	@$(PYTHON) -m venv build/torch-$*
	@build/torch-$*/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$* numpy safetensors || { \
	  echo "make: torch $*: pip found no wheel for $$($(PYTHON) --version 2>&1), or could not fetch it: see above. make PYTHON=python3.12, another TORCH_INDEX, or" \
	    "an interpreter that has it: VRAMFARM_OLD_TORCH=/its/bin/python" >&2; exit 2; }
	@touch $@

docs: install
	$(BIN)/python -m runner.docs

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: expected Python 3.11 or newer, found $$($(PYTHON) --version 2>&1): make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv: apt-get install python3-venv" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "make: installing into $(VENV); the first time takes a few minutes" >&2
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	@$(PIP) --editable '.[train,simulate,dev]'
	@touch $(STAMP)

clean:
	rm -rf .quickstart build dist .mypy_cache .ruff_cache .hypothesis
