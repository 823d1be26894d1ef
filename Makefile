# Every target makes the virtual environment it needs. Nothing has to be installed by hand but Python 3.11 or newer.
#
#   make demo     two runs of a small GPT, one of them loses a rank; they end bit-for-bit the same
#   make test     the tests, on all cores        make check    lint, format, types, also of scripts in the docs
#                 ARGS="-n 0" for one test at a time; other ARGS are pytest's too
#   make bench    the measurements (minutes)     make clean    remove what these made
#   make stories  many more whole jobs with faults than make test has; RACKRUN_STORIES=1/16 for a sixteenth (CI runs one)
#   make frameworks whole jobs of scripts of the Trainer, Lightning, Megatron-Core and others, and streams of other libraries
#   make campaign jobs and faults drawn from 21 seeds; RACKRUN_SEEDS=0:500 for others, RACKRUN_FLAGS=1 for scripts with more in them
#   make double   the workers' tests with a double of NCCL for their device; RACKRUN_DOUBLE=stuck for its other mode (`campaign` takes it too), RACKRUN_DOUBLE_PART=1/4 for less
#   make strangers training scripts as people write them, and faults at their lines; RACKRUN_STRANGERS=0:300 for more seeds
#   make soak     ranks lost at many more random moments; RACKRUN_SOAK_SEEDS=100 for longer
#   make crashes  10,000 crashes of checkpoints, and what is restored; RACKRUN_CRASHES=500 for fewer
#   make gpu-kit  what a GPU has to show (docs/gpu_kit.md): one GPU, a box of 8, or without one a dry run; ARGS="--only D7" for less
#   make site     the documentation as a site in site/; a dead link or a missing page is an error
#   make coverage which lines of the core its own tests reach, in one process; below COVERAGE_MIN % is an error
#   make lock     requirements-dev.lock anew: the newest versions of all packages but torch
#   make wheel    sdist and wheel in dist/; tools/try_wheel.py installs the wheel and runs a job from it
#   make compat   the oldest, the pinned and the newest torch (13 GB, half an hour); ARGS=--brief for less
#
# TORCH says which torch to install when there is none in .venv, with any of pip's options, for example
#   make demo TORCH=torch==2.12.0

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
LOCK   := requirements-dev.lock
COVERAGE_MIN := 97  # % of the lines of rackrun/core; 97.7 were measured
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check

unexport PYTHONDONTWRITEBYTECODE  # else pytest rewrites 7,000 asserts at every start, and every job compiles rackrun

.DEFAULT_GOAL := help
.PHONY: help demo test frameworks stories campaign double strangers soak crashes compat gpu-kit check types bench site coverage lock wheel clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(READY)
	@$(PY) examples/demo.py

test: $(READY)
	@$(PY) -m pytest -n auto --dist worksteal $(ARGS)

frameworks: $(READY)
	@$(PY) -m pytest -n auto --dist worksteal -m "frameworks and not stories and not soak" $(ARGS)

stories: $(READY)
	@$(PY) -m pytest -m "stories and not soak" $(ARGS)

campaign: $(READY)
	@rm -rf out/campaign.jsonl*
	@mkdir -p out
	@$(VENV)/bin/rackctl chaos campaign --seeds $(or $(RACKRUN_SEEDS),1000:1021) --tally out/campaign.jsonl $(ARGS) -- \
	    $(if $(RACKRUN_DOUBLE),tests/worker/doubled.py $(RACKRUN_DOUBLE)) examples/chaos/small.py {wrap} {reduction} 40 {out} $(if $(RACKRUN_FLAGS),{flags})

double: $(READY)
	@RACKRUN_NCCL_DOUBLE=$(or $(RACKRUN_DOUBLE),late) $(PY) -m pytest -n auto --dist worksteal tests/worker $(ARGS)

strangers: $(READY)
	@$(PY) -m tests.strangers --seeds $(or $(RACKRUN_STRANGERS),0:60) --tally out/strangers.jsonl $(ARGS)

soak: $(READY)
	@$(PY) -m pytest -m soak $(ARGS)

crashes: $(READY)
	@$(PY) -m tests.checkpoint.crashes $(ARGS)

compat: $(READY)
	@$(PY) -m tests.worker.torch_versions $(ARGS)

gpu-kit: $(READY)
	@$(PY) -m benchmarks.gpu --out $(or $(OUT),out/gpu) $(ARGS)

check: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(MAKE) --no-print-directory types
	@$(PY) -m pytest -q -m types tests/typing

# The packages of pyproject.toml, then what runs as a script and imports its neighbours by their bare names. Three runs,
# because a run knows a name once: benchmarks/filler.py and benchmarks/workloads/filler.py are both `filler`.
types: $(READY)
	@$(PY) -m mypy
	@MYPYPATH=.:benchmarks:benchmarks/gpu/scripts:examples:examples/chaos:tools $(PY) -m mypy --explicit-package-bases \
	    tools examples/*.py examples/chaos benchmarks/*.py benchmarks/gpu/scripts/*.py
	@MYPYPATH=.:benchmarks/workloads:examples:examples/testing $(PY) -m mypy --explicit-package-bases \
	    benchmarks/workloads examples/testing examples/tasks

bench: $(READY)
	@$(PY) benchmarks/recovery.py $(ARGS)
	@$(PY) benchmarks/exact.py $(ARGS)
	@$(PY) benchmarks/exact_quality.py $(ARGS)
	@$(PY) benchmarks/rack.py
	@$(PY) benchmarks/resizing.py $(ARGS)
	@$(PY) benchmarks/filler.py
	@$(PY) benchmarks/slow_ranks.py $(ARGS)
	@$(PY) benchmarks/snapshots.py $(ARGS)
	@$(PY) benchmarks/snapshot_memory.py $(ARGS)
	@$(PY) benchmarks/snapshot_threads.py
	@$(PY) benchmarks/checkpoint.py $(ARGS)
	@$(PY) benchmarks/compare_torchrun.py
	@$(PY) benchmarks/planner.py
	@$(PY) benchmarks/simulator.py

site: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "site/index.html"

# Without the storms, which draw whole histories: they take minutes, and reach 1 % more.
coverage: $(READY)
	@$(PY) -m coverage run -m pytest -q -n 0 -m "not slow and not soak and not stories" -k "not storm and not test_model" tests/core tests/policy
	@$(PY) -m coverage report --include='rackrun/core/*' --skip-covered --fail-under=$(COVERAGE_MIN)

lock: $(READY)
	@$(PY) -m pip freeze | sed -nE '/^nvidia-ml-py/d; /^(torch|triton|cuda-|nvidia-).*==/p' >$(VENV)/torch.txt
	@$(PIP) --upgrade --upgrade-strategy eager -c $(VENV)/torch.txt -e '.[dev,docs]'
	@sed -n '/^#/p' $(LOCK) >$(VENV)/lock.txt
	@$(PY) -m pip freeze | sed -nE '/^nvidia-ml-py/{p;d}; /^(torch|triton|cuda-|nvidia-)/d; /^[A-Za-z].*==/p' >>$(VENV)/lock.txt
	@mv $(VENV)/lock.txt $(LOCK)
	@touch $(READY)

wheel: $(READY)
	@rm -rf dist
	@$(PY) -m build --quiet --outdir dist .
	@ls dist

clean:
	rm -rf $(VENV) .compat build dist *.egg-info out site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(f"rackrun needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Set PYTHON=...") if sys.version_info < (3, 11) else None'
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PY) -c 'import torch' 2>/dev/null || { echo "installing $(TORCH) (a few minutes, once)"; $(PIP) $(TORCH); }
	@echo "installing rackrun and its development tools"
	@$(PIP) -c $(LOCK) -e '.[dev,docs]'
	@touch $@
