# sopdist: every target sets up what it needs. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED  = $(shell grep -E '^$(1)==' requirements.lock)

.PHONY: help env demo test test-long lint format bench figures clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(READY) ## create .venv with the exact versions of requirements.lock

$(READY): pyproject.toml requirements.lock sopdist/noise/kernels/native.c sopdist/data/decode/pixels.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "The locked versions need Python 3.11 or newer; name one with make PYTHON=..., found: $$($(PYTHON) --version)"; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time: torch, DeepSpeed, DALI, ...)"
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@$(PIP) -c requirements.lock pip setuptools wheel ninja packaging numpy
	@echo "  torch"
	@$(PIP) $(call LOCKED,torch)
	@echo "  deepspeed, which looks for torch while it builds"
	@$(PIP) -c requirements.lock --no-build-isolation $(call LOCKED,deepspeed)
	@echo "  torchvision and timm, which would bring another torch"
	@$(PIP) --no-deps $(call LOCKED,torchvision) $(call LOCKED,timm)
	@echo "  everything else"
	@$(PIP) -c requirements.lock --no-build-isolation --config-settings editable_mode=compat -e '.[demo,triton,data,train,timm,theory,export,dev]'
	@$(BIN)/python -c 'from sopdist.noise.kernels import native_kernels as n; n.is_built() or print( \
		"No C compiler was found: CPU kernels are missing, the slower reference is used. On Debian: apt-get install gcc")'
	@touch $@

demo: $(READY) ## train with 40% of the labels redrawn, with and without SOP, and name the wrong ones
	@$(BIN)/sopdist demo

test: $(READY) lint ## every check that fits in a few minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

test-long: $(READY) ## what starts real launchers, crashes, trains for minutes, or needs a Slurm cluster
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## noise table, steps and input pipeline against their peers, and what the CUDA kernels compile to
	$(BIN)/sopdist bench table
	$(BIN)/sopdist bench step
	$(BIN)/sopdist bench exchange
	$(BIN)/sopdist bench checkpoint
	$(BIN)/sopdist bench input
	$(BIN)/sopdist bench kernels

figures: $(READY) ## all figures of docs/theory.md anew, with their numbers (about 5 minutes on two cores)
	for name in flow landscape phase lambda implicit-bias; do $(BIN)/sopdist theory $$name --out docs/figures || exit 1; done

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
