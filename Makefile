# Developer and user commands. Each target sets up what it needs on a machine with Python >= 3.11, git and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := operator,runtime,gateway,tracing,bench,simulate,dev
# For every platform and Python that the project supports; the index is left out.
PIN = $(BIN)/uv pip compile --quiet --constraint constraints.txt --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-annotate --custom-compile-command 'make requirements'
SBOM := build/sbom-tool
SOURCES := operator runtime tests e2e benchmarks

.PHONY: help install quickstart up test pytest lint e2e e2e-full soak bench-cpu bench-gpu bench-levers bench-front bench-client bench-operator bench-slo bench-slo-validate bench-live format requirements sbom crds clean

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

install: $(VENV)/.installed ## make .venv with the headway command on it

# uv comes from the package registry like everything else; its version is the pinned one. Compiled once here, PyTorch's
# modules are not compiled by every process that imports them where Python may not write beside them.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "headway needs Python >= 3.11, $(PYTHON) is $$($(PYTHON) --version); remedy: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) \
	  || { echo "cannot make a virtual environment; remedy: install your system's python3-venv package"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

quickstart: install ## serve the bundled model, break its latency target, watch Headway repair it
	$(BIN)/python -m e2e.quickstart

up: install ## serve the bundled model until stopped
	$(BIN)/headway up -f e2e/manifests/quickstart.yaml

test: lint pytest ## everything that needs no cluster

pytest: install ## its tests alone (PYTEST_ARGS= are paths and options of pytest, for a part of them)
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: install ## format, lint, types, layers and generated files
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/headway crds --check

e2e: install ## a real Kubernetes on this machine, real pods, real load (Linux, root)
	$(BIN)/python -m e2e.cluster run -- $(abspath $(BIN))/python -m pytest e2e

e2e-full: install ## the same with 100 scale-downs, 20 rollouts, longer chaos and minutes of disturbance (e2e/README.md has the numbers)
	HEADWAY_E2E_CAMPAIGN_SECONDS=$${HEADWAY_E2E_CAMPAIGN_SECONDS:-600} HEADWAY_E2E_AWAY_SECONDS=$${HEADWAY_E2E_AWAY_SECONDS:-120} \
	  HEADWAY_E2E_SCALE_DOWNS=$${HEADWAY_E2E_SCALE_DOWNS:-100} HEADWAY_E2E_ROLLOUTS=$${HEADWAY_E2E_ROLLOUTS:-20} \
	  HEADWAY_E2E_KILLS=$${HEADWAY_E2E_KILLS:-5} HEADWAY_E2E_ETCD_SECONDS=$${HEADWAY_E2E_ETCD_SECONDS:-30} \
	  HEADWAY_E2E_CONTAINERD_SECONDS=$${HEADWAY_E2E_CONTAINERD_SECONDS:-30} \
	  HEADWAY_E2E_RESULTS=$${HEADWAY_E2E_RESULTS:-$(abspath e2e/results/full.json)} \
	  $(BIN)/python -m e2e.cluster run -- $(abspath $(BIN))/python -m pytest -rP e2e

soak: install ## ten minutes of random traffic against one server, then fuzzing and random schedules (20 minutes)
	$(BIN)/python -m benchmarks.soak.run --seconds $${HEADWAY_SOAK_SECONDS:-600}
	HEADWAY_FUZZ_EXAMPLES=$${HEADWAY_FUZZ_EXAMPLES:-5000} $(BIN)/pytest tests/soak --timeout=1800
	HEADWAY_TRAJECTORIES=$${HEADWAY_TRAJECTORIES:-20000} $(BIN)/pytest tests/runtime_core/test_trajectories.py --timeout=1800

bench-cpu: install ## Headway beside vLLM CPU, llama.cpp and transformers, and with each lever (40 minutes; the first time longer, and gigabytes)
	$(BIN)/python -m benchmarks.cpu.run $(BENCH_CPU)

bench-gpu: ## the engine on one GPU, with GPU_PYTHON and the torch that it has (STAGE=first, checks, kernels, engine or peers: 9 minutes each, gathered in gpu-results.json)
	PYTHONPATH=runtime $(or $(GPU_PYTHON),python3) -m benchmarks.gpu.run --out gpu-results.json $(if $(STAGE),--stage $(STAGE)) $(BENCH_GPU)

bench-levers: install ## one lever after the other on questions about documents: latency, users within an SLO
	$(BIN)/python -m benchmarks.levers.run --json benchmarks/levers/results.json --page docs/levers.md $(BENCH_LEVERS)

bench-front: install ## what one HTTP process carries, with an engine that costs nothing
	$(BIN)/python -m benchmarks.front.run $(BENCH_FRONT)

bench-client: install ## what `headway bench` itself costs (4 minutes, wants an idle machine)
	$(BIN)/python -m benchmarks.bench.run $(BENCH_CLIENT)

bench-operator: install ## one operator and up to 1,000 services with 3,000 pods on a real API server (10 minutes, wants an idle machine)
	$(BIN)/python -m benchmarks.operator.run $(BENCH_OPERATOR)

bench-slo: install ## the controller against other autoscalers and an oracle, simulated (70 to 90 minutes of two cores; AZURE=, MOONCAKE=, SERVEGEN= are trace files)
	$(BIN)/python -m benchmarks.slo.run $(if $(AZURE),--azure $(AZURE)) $(if $(MOONCAKE),--mooncake $(MOONCAKE)) $(if $(SERVEGEN),--servegen $(SERVEGEN)) $(BENCH_SLO)

bench-slo-validate: install ## a simulated replica against the real engine on this machine's CPU (20 minutes, idle)
	$(BIN)/python -m benchmarks.slo.validate $(BENCH_SLO_VALIDATE)

bench-live: install ## the controller on a real cluster beside a fixed number of replicas and an HPA (25 minutes; TRACE= is a trace file)
	$(BIN)/python -m e2e.cluster run -- $(abspath $(BIN))/python -m benchmarks.live.run $(if $(TRACE),--trace $(abspath $(TRACE))) \
	  --json benchmarks/live/results.json --output benchmarks/live/results.md $(BENCH_LIVE)

format: install ## format and fix what can be fixed
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

requirements: install ## pin and hash what the images and `make sbom` install (requirements/), from pyproject.toml and constraints.txt
	$(PIN) pyproject.toml --extra operator --extra gateway --output-file requirements/operator.txt
	$(PIN) pyproject.toml --extra runtime --output-file requirements/runtime.txt
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	  | $(PIN) - --output-file requirements/build.txt
	echo cyclonedx-bom | $(PIN) - --output-file requirements/sbom.txt

sbom: install ## the Python packages of the images, as CycloneDX lists with hashes and licences' places (build/sbom/)
	mkdir -p build/sbom
	$(BIN)/uv venv --quiet --clear $(SBOM)
	$(BIN)/uv pip sync --quiet --python $(SBOM) --require-hashes requirements/sbom.txt
	for image in operator runtime; do \
	  $(SBOM)/bin/cyclonedx-py requirements requirements/$$image.txt --pyproject pyproject.toml --output-reproducible \
	    --output-file build/sbom/headway-$$image.cdx.json; \
	done

crds: install ## write crds/ and the chart's copy from the models
	$(BIN)/headway crds

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
