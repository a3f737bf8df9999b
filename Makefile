# `make` lists the targets. The first one you run creates .venv.
#
# Choose another torch, or where pip looks for it, when the environment is first made:
#   make test PIP_ARGS="--find-links /path/to/wheels"
#   make test TORCH_SPEC="torch==2.12.1" PYTHON=python3.12
# A torch >=2.11,<2.14 that is already in .venv is never replaced.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all quick lint style docs bench bench-gpu gpu fuzz sweep clean

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
SWEEP_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

export PYTHONUNBUFFERED := 1

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## run examples/demo.py
	$(BIN)/python examples/demo.py

test: style ## lint and the tests, types beside the first of them
	@echo "test: mypy beside pytest"
	$(BIN)/mypy & types=$$!; code=0; \
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder tests $(PYTEST_ARGS) || code=$$?; \
	wait $$types || { echo "test: mypy failed, see above" >&2; code=1; }; \
	exit $$code

test-all: export AUTOSHARD_ALL_CASES := 1
test-all: .venv/.trainers test ## all cases of the long tests, half an hour

.venv/.trainers: pyproject.toml $(STAMP)
	$(PIP) install --quiet --constraint .venv/constraints.txt --editable '.[trainers]' $(PIP_ARGS)
	@touch $@

quick: $(STAMP) ## the fast tests, about a minute
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $$(sed -n '/^tests/s/:.*//p' tests/fast.txt) $(PYTEST_ARGS)

lint: style ## ruff check, ruff format --check, mypy
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

docs: $(STAMP) .venv/.docs ## build the documentation into build/docs; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "docs: build/docs/index.html"

.venv/.docs: pyproject.toml $(STAMP)
	$(PIP) install --quiet --constraint .venv/constraints.txt --editable '.[docs]' $(PIP_ARGS)
	@touch $@

bench: $(STAMP) ## run the benchmarks
	PYTHONPATH=tests $(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-gpu: $(STAMP) ## check and time the kernels on this machine's GPU
	PYTHONPATH=tests $(BIN)/python -m benchmarks.kernels $(BENCH_ARGS)

gpu: $(STAMP) ## all that one GPU can tell, written to docs/benchmarks/gpu.md (BENCH_ARGS="--small" without one)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.gpu $(BENCH_ARGS)

fuzz: $(STAMP) ## run 2,000 random graphs, modules and training scripts (FUZZ_ARGS="--kind K --cases N --seconds N --first N")
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ_ARGS)

sweep: $(STAMP) ## plan 200 random real cases (SWEEP_ARGS="--cases N --seed N --case K --limit N --plain")
	PYTHONPATH=tests $(BIN)/python -m benchmarks sweep $(SWEEP_ARGS)

clean: ## remove caches, build artefacts and out/ (keeps .venv)
	rm -rf build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Exits 0 when a supported torch is installed.
TORCH_OK := from importlib.metadata import version; \
	v = tuple(int(x) for x in version("torch").split(".")[:2]); raise SystemExit(not (2, 11) <= v < (2, 14))
TORCH_PIN := from importlib.metadata import version; print("torch==" + version("torch"))

# torch goes in first and alone, then stands as a constraint, so that nothing after it can replace it.
# pip would compile all of torch and transformers, for a minute: what most processes import is enough.
# Some distributions ship venv without ensurepip: then the outer pip puts pip in.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "autoshard needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "setup: creating .venv with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv .venv || { \
			$(PYTHON) -m venv --clear --without-pip .venv; \
			$(PYTHON) -m pip --python $(BIN)/python install pip $(PIP_ARGS); }; \
	fi
	@if $(BIN)/python -c '$(TORCH_OK)' 2>/dev/null; then \
		echo "setup: keeping the installed torch"; \
	else \
		echo "setup: installing $(TORCH_SPEC) (large; this is the slow part)"; \
		$(PIP) install --no-compile '$(TORCH_SPEC)' $(PIP_ARGS); \
	fi
	@$(BIN)/python -c '$(TORCH_PIN)' >.venv/constraints.txt
	@echo "setup: installing autoshard[hf,dev], with $$(cat .venv/constraints.txt)"
	@$(PIP) install --quiet --no-compile --constraint .venv/constraints.txt --editable '.[hf,dev]' $(PIP_ARGS)
	@$(BIN)/python -c 'import autoshard.api, torch._dynamo, transformers.models.llama.modeling_llama'
	@touch $@
	@echo "setup: done"
