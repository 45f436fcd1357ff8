# make serve   check the configuration and start the service on 127.0.0.1:8000 (Ctrl-C ends it)
# make test    lint, types, tests: all that CI runs; make test-all: the slow tests and all model families too
# make test-random   the same tests in a random order; SEED repeats one
# make fuzz    property tests with fresh examples, for FUZZ_MINUTES (30); says how to keep what it finds
# make evaluate-quick   default and three baselines on short traces, in minutes; make evaluate: the paper's grid, in hours
# make gpu-check   what can be checked on a machine with one GPU, in stages of minutes (docs/gpu.md)
# make demo    eight workers, requests that move between them at step boundaries (a minute)
# All make .venv on first use (gpu-check only where torch and the like are missing). PYTHON chooses the interpreter (3.11 or 3.12), CONFIG another deployment.

PYTHON ?= python3
CONFIG ?= deployments/quickstart.yaml
FUZZ_MINUTES ?= 30
SEED ?=
BIN := .venv/bin

# Nothing is reported home. (Nothing is fetched either but models of the hub that the configuration names:
# tridentserve/pipelines sees to that, and other programs, such as AIPerf, do not work when they are told that they are
# offline.)
export RAY_USAGE_STATS_ENABLED := 0
# The proxy notices a dead replica in seconds (the default takes over 20).
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S ?= 1
# Workers share the cores evenly with other programs (by Ray's default, niceness 15, they give way to all of them).
export RAY_worker_niceness ?= 0

# Compiled modules are kept: each process would compile all of this repository's again.
unexport PYTHONDONTWRITEBYTECODE

GPU_CHECK_NEEDS := torch diffusers transformers pydantic pandas pytest pytest_asyncio
HAS_GPU_CHECK = import importlib.util as i, sys; sys.exit(sys.version_info < (3, 11) or not all(map(i.find_spec, "$(GPU_CHECK_NEEDS)".split())))

.PHONY: serve demo gpu-check evaluate evaluate-quick test test-all test-random fuzz lint types install check clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "Python 3.11 or 3.12 is needed (make PYTHON=python3.11 ...)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# As pip would, but on all cores. Some packages have files that are no modules.
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@

check: install
	$(BIN)/python scripts/check_config.py $(CONFIG)

serve: install
	$(BIN)/python scripts/serve.py $(CONFIG)

demo: install
	$(BIN)/python scripts/demo_preemption.py

evaluate-quick: install
	$(BIN)/python scripts/evaluate.py --models sd3-medium flux.1-dev --workloads light heavy dynamic \
		--policies default b1 b3 b6 --duration-s 240 --out out/evaluation-quick

evaluate: install
	$(BIN)/python scripts/evaluate.py --out out/evaluation

# With the environment at hand where it has all that is needed: a machine with a GPU may have no network.
gpu-check:
	@for python in $(BIN)/python $(PYTHON); do \
		if $$python -c '$(HAS_GPU_CHECK)' 2> /dev/null; then \
			export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"; \
			exec $$python scripts/gpu_check.py; \
		fi; \
	done; \
	$(MAKE) install && exec $(BIN)/python scripts/gpu_check.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# TypeScript and axe-core, for the tests of the console; without npm or a registry these are skipped, and say so.
tests/e2e/console/node_modules/.installed: tests/e2e/console/package-lock.json
	if command -v npm > /dev/null; then npm ci --silent --no-audit --no-fund --fetch-timeout=20000 --fetch-retries=1 --prefix tests/e2e/console && touch $@ || true; fi

test: install tests/e2e/console/node_modules/.installed
	$(BIN)/python -m tests

test-all: install tests/e2e/console/node_modules/.installed
	$(BIN)/python -m tests --all

test-random: install tests/e2e/console/node_modules/.installed
	$(BIN)/python -m tests --shuffle $(if $(SEED),--seed $(SEED))

fuzz: install
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
