# Two commands matter: `make demo` trains for real, `make test` proves the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt

# Tests start hundreds of processes: each would compile the project anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

# What `make demo` trains; the bundled example sets everything else itself.
DEMO_FLAGS ?= --backend pytorch-ddp --num-processes 2 --epochs 15
DEMO_OUTPUT := --checkpoint-dir demo/checkpoints --tensorboard-dir demo/runs \
	--mlflow --mlflow-experiment demo --set tracking.mlflow_tracking_uri=sqlite:///demo/mlflow.db

.PHONY: demo test test-fast test-gpu gpu-wheels test-cluster zoo-vision test-tools cluster-tools check clean help horovod docs docs-serve deploy-templates

help:
	@echo "make demo    train the bundled example on real data under PyTorch DDP with two ranks"
	@echo "make test    every test (make test-tools installs what it needs of the system: Chromium, a C++ compiler)"
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

# More processes than cores do not end earlier. 0: pytest without workers, for a debugger.
TEST_PROCESSES ?= 2
test: $(VENV)/.for-dev $(VENV)/.horovod
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope $(PYTEST_FLAGS)

# Another torch than the environment's, such as one that the machine came with: GPU_PYTHON. See tests/gpu/README.md.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PACKAGES := pluggy pydantic cloudpickle psutil pytest rich
test-gpu:
	$(GPU_PYTHON) -m tests.gpu $(GPU_FLAGS)

# Rows of tests/campaigns/zoo whose libraries cannot be imported beside the CPU build of torch.
zoo-vision: | $(BIN)/pip
	$(INSTALL) --no-deps --target build/zoo torchvision==0.28.0 timm==1.0.31

# For a machine without a network, of that version of Python.
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels: | $(BIN)/pip
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

horovod: $(VENV)/.horovod

deploy-templates: $(VENV)/.for-dev
	$(BIN)/python deploy/render.py

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# pip is the last thing that venv installs: without it, the environment is half made.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# A stamp per set of packages, made again when the pins change. torch comes first and by its
# pinned version: a range that admits a newer release would fetch gigabytes of CUDA packages.
$(VENV)/.torch: $(PINS) | $(BIN)/pip
	@echo "installing torch (several minutes when it is not cached)"
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.for-demo: $(VENV)/.torch
	$(INSTALL) -e '.[torch,examples,tensorboard,mlflow]'
	touch $@

# Pages are made from the source's text: no framework is needed.
$(VENV)/.for-docs: $(PINS) | $(BIN)/pip
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/.for-dev: $(VENV)/.torch
	@echo "installing every backend and the development tools"
	$(INSTALL) -e '.[dev]'
	touch $@

# Not on the index as a wheel, and its source needs a change: see the script.
$(VENV)/.horovod: $(VENV)/.for-dev deploy/horovod/build.py
	$(BIN)/python deploy/horovod/build.py
	touch $@
