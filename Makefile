# Two commands: `make run` (the quickstart) and `make test`. Everything else serves them.
#
#   PYTHON=python3.12                                      another interpreter, 3.11 or newer
#   TORCH_INDEX=URL                                        an index of torch without CUDA: 2 GB less to download
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for processes more than they compute: three at once keep two cores busy.
PYTEST = $(BIN)/python -m pytest -n 3 --dist worksteal
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The container tests use an engine of ours where scripts/docker-engine.sh started one, else whichever answers.
ENGINE := eval "$$(scripts/docker-engine.sh env 2>/dev/null)";

.PHONY: run test test-failed check bench bench-transfer correctness chaos chaos-disks chaos-stores chaos-outputs chaos-exits test-old-torch install clean docs

run: install
	@$(BIN)/vramfarm-runner simulate --state .quickstart/vramfarm --run configs/quickstart.yaml

test: install
	@mkdir -p build && rm -rf build/pytest-cache build/test-exit
	@$(ENGINE) $(PYTEST) tests || { echo $$? >build/test-exit; exit 1; }

# What failed in the last `make test`, one after the other: a fault fails again, a machine too busy for a time limit does not.
test-failed: install
	@$(ENGINE) $(BIN)/python -m pytest --last-failed --last-failed-no-failures none tests

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m runner.docs --check
	@$(ENGINE) $(PYTEST) tests

# What a save and a restart cost, scaled down: two ranks on the processor, a quarter of an hour. On cards: benchmarks/gpu/run.sh
bench: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/checkpoint.py \
	  --dim 1024 --layers 8 --batch 1 --tokens 8 --optimizer fused --rounds 4 --limit-s 420 --save-limit-s 60 --out build/bench-out
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/gpu/restart.py build/bench-out --rounds 4 --limit-s 300 \
	  --size "--layers 6 --hidden 1280 --vocabulary 8192 --sequence 16 --per-card 1 --global-batch 2"
	@cat build/bench-out/checkpoint.md build/bench-out/restart.md

# What goes wrong while a checkpoint is written or read, done to ours and to torch's DCP: make correctness ROUNDS=1000
ROUNDS ?= 100
correctness: install
	$(BIN)/python benchmarks/correctness.py --rounds $(ROUNDS) --out build/correctness

# Whole runs with torchrun and an S3 server, killed at every point of a save, and power that is lost (root and a loop device, else the table says
# that it was not). JOBS rounds side by side: two a core. STORE=--store strikes at requests to the store. FAKE=--fake leaves torch out, which is three quarters of it; SEED: of the first round.
FAKE ?=
STORE ?=
JOBS ?= 2
SEED ?= 0
chaos: install
	@PYTHONPATH=. $(BIN)/python benchmarks/chaos/storm.py --rounds $(ROUNDS) --jobs $(JOBS) --seed $(SEED) $(FAKE) $(STORE); code=$$?; cat build/chaos/chaos.md; exit $$code

# Disks that are full, read-only, slow or failing below a whole run; and how long a training takes to end while a save is on its way.
chaos-disks: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/disks.py

# Stores that are down, full, broken or silent beside a whole run; and many small outputs. STAYS: seconds for which one is down.
STAYS ?= 1200
STORES ?=
chaos-stores: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/stores.py --stays-s $(STAYS) $(STORES)

chaos-outputs: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/outputs.py

chaos-exits: install
	PYTHONPATH=. $(BIN)/python benchmarks/chaos/exits.py

# Uploads and downloads beside other clients, to an S3 server on this machine.
bench-transfer: install
	PYTHONPATH=. $(BIN)/python benchmarks/transfer.py

# The oldest torch that we support, and the oldest whose own reader reads our shards: installed from pip's index (6 GB each, with CUDA), or
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
