# Two commands matter: `make demo` trains for real, `make test` proves the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of them never are.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c constraints.txt --build-constraint constraints.txt
PINS := pyproject.toml constraints.txt
# A step of the set-up: prints its seconds.
STEP := @tests/support/step.sh

# Tests start hundreds of processes: each would compile the project anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

# What `make demo` trains; the bundled example sets everything else itself.
DEMO_FLAGS ?= --backend pytorch-ddp --num-processes 2 --epochs 15
DEMO_OUTPUT := --checkpoint-dir demo/checkpoints --tensorboard-dir demo/runs \
	--mlflow --mlflow-experiment demo --set tracking.mlflow_tracking_uri=sqlite:///demo/mlflow.db

.PHONY: demo test test-environment campaigns long test-fast test-gpu gpu-wheels test-cluster zoo-vision test-tools cluster-tools check clean help horovod docs docs-serve deploy-templates

help:
	@echo "make demo    train the bundled example on real data under PyTorch DDP with two ranks"
	@echo "make test    the tests of every push (make test-tools installs Chromium and a C++ compiler for them)"
	@echo "make campaigns  the tests that a push leaves out: docs/testing.md"
	@echo "make long versions  contracts under an older torch, in an environment of its own; NAME in tests/campaigns"
	@echo "make test-fast  tests that start no process, and the contracts on serial and pytorch-ddp: minutes"
	@echo "make test-gpu      correctness and cost on this machine's GPUs: tests/gpu/README.md"
	@echo "make gpu-wheels    what test-gpu needs beyond torch, as wheels in build/gpu/wheels"
	@echo "make test-cluster   real Slurm, hosts in network namespaces: as root (make cluster-tools installs what it needs)"
	@echo "make horovod build Horovod for the installed torch (make test does it, too)"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make docs    the documentation site, in build/site (make docs-serve shows it)"
	@echo "make deploy-templates  render deploy/ again, after a change of its example or of the renderer"
	@echo "make clean   remove the environment, caches and what demo wrote"

demo: $(VENV)/.for-demo
	mkdir -p demo
	$(BIN)/python -m distributed.cli train $(DEMO_FLAGS) $(DEMO_OUTPUT)

# Three, or two where memory is short. TEST_PROCESSES=0: pytest without workers, for a debugger.
TEST_PROCESSES ?= $$($(BIN)/python -m tests.support.num_processes)
# A push folds the largest matrices, and make campaigns unfolds them. PYTEST_FLAGS select among all tests.
TIER ?= $(if $(PYTEST_FLAGS),all,push)
test: test-environment
	@tests/support/install.sh --check test
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --tier=$(TIER) \
		$(addprefix --campaign=,$(CAMPAIGN)) $(RECORD) $(PYTEST_FLAGS)

# What a push leaves out, all of it or the groups in CAMPAIGN. Groups that passed on this commit are not run again.
campaigns: test-environment
	$(BIN)/python -m tests.campaigns run $(CAMPAIGN)

# What takes hours or gigabytes, and is never part of CI: make long versions LONG_FLAGS="--torch 2.12.1".
ifeq ($(firstword $(MAKECMDGOALS)),long)
LONG := $(wordlist 2,2,$(MAKECMDGOALS))
$(if $(wildcard tests/campaigns/$(LONG).py),,$(error make long NAME: NAME is a module of tests/campaigns, such as versions))
.PHONY: $(LONG)
$(LONG): ; @:
endif
long: $(VENV)/.for-dev
	$(BIN)/python -m tests.campaigns.$(LONG) $(LONG_FLAGS)

# Another torch than the environment's, such as one that the machine came with: GPU_PYTHON. See tests/gpu/README.md.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PACKAGES := pluggy pydantic cloudpickle psutil pytest rich
test-gpu:
	$(GPU_PYTHON) -m tests.gpu $(GPU_FLAGS)

# Rows of tests/campaigns/zoo whose libraries cannot be imported beside the CPU build of torch.
zoo-vision: $(VENV)/.pip
	$(INSTALL) --no-deps --target build/zoo torchvision==0.28.0 timm==1.0.31

# For a machine without a network, of that version of Python.
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels: $(VENV)/.pip
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt -d build/gpu/wheels \
		--only-binary=:all: --python-version $(GPU_PYTHON_VERSION) $(GPU_PACKAGES)

test-fast: $(VENV)/.for-dev
	$(BIN)/python -m pytest --fast $(PYTEST_FLAGS)

test-tools:
	tests/support/install.sh test

cluster-tools:
	tests/support/install.sh cluster

# The two groups wait for daemons and time limits most of the time, so they run side by side.
test-cluster: $(VENV)/.for-dev
	@tests/support/install.sh --check cluster
	$(BIN)/python -m pytest tests/cluster/test_slurm.py $(PYTEST_FLAGS) & slurm=$$!; \
	$(BIN)/python -m pytest tests/cluster --ignore=tests/cluster/test_slurm.py $(PYTEST_FLAGS); hosts=$$?; \
	wait $$slurm && exit $$hosts

check: $(VENV)/.for-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A link that leads nowhere fails it.
docs: $(VENV)/.for-docs
	$(BIN)/python -m docs.site.build

docs-serve: docs
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory build/site

# Horovod is compiled while the other packages are installed: each takes minutes.
test-environment horovod: $(VENV)/.for-horovod
	@$(MAKE) --silent --no-print-directory --jobs=2 $(VENV)/.horovod

deploy-templates: $(VENV)/.for-dev
	$(BIN)/python deploy/render.py

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# pip is the last thing that venv installs: without it, the environment is half made.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(STEP) environment $(PYTHON) -m venv $(VENV)

# Python's own pip is years older, and not the same everywhere.
$(VENV)/.pip: constraints.txt | $(BIN)/pip
	$(STEP) pip $(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^pip==' constraints.txt)"
	@touch $@

# A stamp per set of packages, made again when the pins change. torch comes first and by its
# pinned version: a range that admits a newer release would fetch gigabytes of CUDA packages.
$(VENV)/.torch: $(PINS) $(VENV)/.pip
	$(STEP) torch $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.for-demo: $(VENV)/.torch
	$(STEP) "packages of the demo" $(INSTALL) -e '.[torch,examples,tensorboard,mlflow]'
	@touch $@

# Pages are made from the source's text: no framework is needed.
$(VENV)/.for-docs: $(PINS) $(VENV)/.pip
	$(STEP) "packages of the site" $(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.for-dev: $(VENV)/.torch
	$(STEP) "every backend and the development tools" $(INSTALL) -e '.[dev]'
	@touch $@

# Not on the index as a wheel, and its source needs a change: see the script.
$(VENV)/.for-horovod: $(VENV)/.torch deploy/horovod/build.py
	$(STEP) "what Horovod is built with" $(INSTALL) -e '.[horovod]'
	@$(BIN)/python deploy/horovod/build.py --check
	@touch $@

$(VENV)/.horovod-wheel: $(VENV)/.for-horovod
	$(STEP) "Horovod's wheel" $(BIN)/python deploy/horovod/build.py --no-install
	@touch $@

$(VENV)/.horovod: $(VENV)/.for-dev $(VENV)/.horovod-wheel
	$(STEP) Horovod $(BIN)/python deploy/horovod/build.py
	@touch $@
