# Every target sets up what it needs. `make help` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED  = $(shell grep -E '^$(1)==' requirements.lock)

.PHONY: help env demo test test-long lint format bench benchmarks figures clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(READY) ## create .venv with the exact versions in requirements.lock

$(READY): pyproject.toml requirements.lock sopdist/noise/kernels/native.c sopdist/data/decode/pixels.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "The locked versions need Python 3.11 or newer; choose one with make PYTHON=...; found: $$($(PYTHON) --version)"; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time: torch, DeepSpeed, DALI, ...)"
	@$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@$(PIP) -c requirements.lock pip setuptools wheel ninja packaging numpy
	@echo "  torch"
	@$(PIP) $(call LOCKED,torch)
	@echo "  deepspeed (its build needs torch)"
	@$(PIP) -c requirements.lock --no-build-isolation $(call LOCKED,deepspeed)
	@echo "  torchvision and timm (without dependencies, which would replace torch)"
	@$(PIP) --no-deps $(call LOCKED,torchvision) $(call LOCKED,timm)
	@echo "  everything else"
	@$(PIP) -c requirements.lock --no-build-isolation --config-settings editable_mode=compat -e '.[triton,data,train,timm,theory,bench,export,dev]'
	@$(BIN)/python -c 'from sopdist.noise.kernels import native_kernels as n; n.is_built() or print( \
		"No C compiler found: the CPU kernels are not built, and the slower reference is used. On Debian: apt-get install gcc")'
	@touch $@

demo: $(READY) ## train with 40% of the labels resampled, with and without SOP, and list the wrong labels
	@$(BIN)/sopdist demo

test: $(READY) lint ## lint, and the tests that take a few minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

test-long: $(READY) ## the tests that start real launchers, crash runs, train for minutes, or need a Slurm cluster
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## benchmark noise table, training step, exchange, checkpoints and input pipeline; compile the CUDA kernels
	$(BIN)/sopdist bench table
	$(BIN)/sopdist bench step
	$(BIN)/sopdist bench exchange
	$(BIN)/sopdist bench checkpoint
	$(BIN)/sopdist bench input
	$(BIN)/sopdist bench kernels

# All methods on Fashion-MNIST. QUICK=1: a smoke test with two epochs. More seeds and label noise:
# make benchmarks SEEDS=3 NOISE=sym-0.4-seed0,sym-0.6-seed0,asym-0.4-seed0
SEEDS   ?= 1
NOISE   ?= sym-0.4-seed0
SHARDS  := results/shards/fashion-mnist
PAIRS   := 0:6,6:0,2:4,4:2,5:7,7:5,9:7
METHODS := ce,forward,gce,gce:truncate=0.5,sl,mixup,coteaching:forget=0.36,coteaching_plus:forget=0.36,elr,elr_plus,$\
           dividemix,cores2,cores2_star,sop,sop:consistency=0.9:balance=0.1
benchmarks: $(READY) ## the accuracy table of docs/methods.md, and the training times
	test -d $(SHARDS) || $(BIN)/sopdist prepare fashion-mnist --out $(SHARDS) --val 0.75
	for split in train val; do test -e $(SHARDS)/$$split/labels/asym-0.4-seed0.npy || $(BIN)/sopdist labels noise \
		$(SHARDS)/$$split pair --rate 0.4 --pairs $(PAIRS) --name asym-0.4-seed0 || exit 1; done
	$(BIN)/sopdist compare --cfg fashion_mnist --methods $(METHODS) --noise $(NOISE) \
		--seeds $(SEEDS) --out results/methods$(if $(QUICK),-quick) data.root=$(SHARDS) log.wandb=off \
		'evaluate.splits={val: val, test: test}' evaluate.every=6 $(if $(QUICK),train.epochs=2)
	$(BIN)/sopdist bench methods $(if $(QUICK),--quick)

figures: $(READY) ## all figures of the docs, with their numbers (about 7 minutes on two cores)
	$(BIN)/sopdist demo --figure docs/figures/demo.png
	for name in flow landscape phase lambda implicit-bias; do $(BIN)/sopdist theory $$name --out docs/figures || exit 1; done

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
