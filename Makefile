# Everything a developer runs. `make demo` and `make test` install what they need into .venv first.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The version that tests run with. On a machine without a GPU, point PIP_EXTRA_INDEX_URL at PyTorch's CPU index to
# spare gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0

# What an editable install does not pick up by itself: dependencies, stubs, native code, new packages.
SOURCES := pyproject.toml $(shell find protos worker/native -name '*.proto' -o -name 'CMakeLists.txt' -o -name '*.cpp' -o -name '*.hpp') \
	$(shell find service worker client -name '__init__.py')
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: demo test lint release-protos unit soak chaos fuzz test-native test-clients gpu-wheel gpu-check clean

demo: $(INSTALLED)
	@$(BIN)/python bench/demo.py $(BIN)

test: lint unit

# Tests and the services that they start share the machine's cores: threads that spin while they wait would take them
# from each other. So many files of tests run side by side.
TEST_JOBS ?= $(shell nproc)
unit: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests --numprocesses=$(TEST_JOBS) --dist=loadfile

# With what `make test` leaves out to keep within its time: the same in more states and modes.
full: $(INSTALLED_DEV)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests --full

lint: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	cd protos && ../$(BIN)/buf lint
	cd protos && ../$(BIN)/buf breaking --against released.binpb

# With every release, to be committed with it: what `make lint` compares the API with from then on.
release-protos: $(INSTALLED_DEV)
	cd protos && ../$(BIN)/buf build --exclude-source-info --output released.binpb

# Random workloads for the whole engine, other ones each time: an hour on two quiet cores, at most two hours for each
# model. Then an hour of requests, after which both processes must be as large as before.
SOAK_WORKLOADS ?= 5000
SOAK_SECONDS ?= 3600
soak: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/properties/test_engine.py -s --workloads=$(SOAK_WORKLOADS)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/stress/test_memory.py -s --full --soak-seconds=$(SOAK_SECONDS)

# Ten minutes of random faults under random callers, then the worker killed twenty times under 64 streams, and all that
# can befall either process in all modes; `make test` has 45 seconds of the first, and some of the others.
CHAOS_SECONDS ?= 600
chaos: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -s tests/stress/test_chaos.py \
		tests/blackbox/test_replacement.py tests/blackbox/test_failed_requests.py tests/blackbox/test_service_killed.py \
		tests/service/test_succession.py --full --chaos-seconds=$(CHAOS_SECONDS) --kills=20

# Damaged bytes for rings, messages and calls, other ones each time; `make test` has twenty seconds of it, the same each
# time. What fails names its seed: make fuzz FUZZ_SEED=...
FUZZ_SECONDS ?= 300
FUZZ_SEED ?= $(shell date +%s)
fuzz: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/fuzz --timeout=$$(($(FUZZ_SECONDS) + 300)) \
		--fuzz-seconds=$(FUZZ_SECONDS) --fuzz-seed=$(FUZZ_SEED)

# The native stress tests at length, about a minute; `make test` has a short form. Longer: make test-native NATIVE_RECORDS=100000000
NATIVE_RECORDS ?= 2000000
test-native: $(INSTALLED_DEV)
	$(BIN)/python -m pytest tests/worker/native --native-records=$(NATIVE_RECORDS)

# The clients in other languages, all of them; `make test` leaves out those whose tools are not installed. As root on
# Debian 12 or the like this installs the tools, else it says which are missing. Node comes from PyPI if need be.
CLIENT_TOOLS := cmake g++ golang-go golang-google-grpc-dev golang-google-genproto-dev golang-google-protobuf-dev \
	golang-github-golang-protobuf-1-5-dev protoc-gen-go-1-5 protoc-gen-go-grpc \
	libgrpc++-dev protobuf-compiler protobuf-compiler-grpc
test-clients: $(INSTALLED_DEV)
	@if ! dpkg --status $(CLIENT_TOOLS) > /dev/null 2>&1; then \
		if [ "$$(id --user)" != 0 ]; then echo 'As root: apt-get install $(CLIENT_TOOLS)'; exit 1; fi; \
		apt-get update --quiet && \
		DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends $(CLIENT_TOOLS); \
	fi
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/clients --every-language

# What only a GPU can show, in under eight minutes, on a machine with Python 3.11 or newer, torch, triton and transformers,
# where nothing can be fetched: `make gpu-wheel` here, bring the tree with dist/ there, `make gpu-check` there. With DRY=1
# the same script runs on the CPU, at toy size. Results go to $$OUT/gpu_check.json, else to bench/out.
gpu-wheel: $(INSTALLED)
	rm -rf dist/gpu && mkdir -p dist/gpu
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist/gpu .

ifdef DRY
gpu-check: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python bench/gpu_check --dry
else
gpu-check:
	$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target dist/gpu/packages dist/gpu/*.whl
	PYTHONPATH=dist/gpu/packages $(PYTHON) bench/gpu_check
endif

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(INSTALLED): $(VENV)/.created $(SOURCES)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

clean:
	rm -rf build dist tests/clients/node/node_modules $(VENV)
