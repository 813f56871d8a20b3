# Each command first makes what it needs: a virtual environment in the clone, with pinned versions.
#   ENV=current      use the present environment, in which nothing is installed
#   TORCH=2.11       the oldest supported torch, or 2.15 the newest, in a virtual environment of its own
#   IPYKERNEL=6.31   the older supported ipykernel, in one of its own; `test` runs the browser tests
#   PYTHON=...       the Python that a virtual environment is made of, and that ENV=current runs
PYTHON ?= python3
TORCH ?= 2.13
CONSTRAINTS = constraints$(if $(filter-out 2.13,$(TORCH)),-torch$(subst .,,$(TORCH))).txt
VENV = .venv$(if $(filter-out 2.13,$(TORCH)),-torch$(subst .,,$(TORCH)))$(if $(IPYKERNEL),-ipykernel$(subst .,,$(IPYKERNEL)))
ifeq ($(ENV),current)
COURSE = installed
TEST = installed
RUN = PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(PYTHON)
else
TEST = $(VENV)/installed-test
COURSE = $(if $(wildcard $(TEST)),$(TEST),$(VENV)/installed-course)
RUN = VIRTUAL_ENV="$(CURDIR)/$(VENV)" PATH="$(CURDIR)/$(VENV)/bin:$$PATH" \
	JUPYTER_PATH="$(CURDIR)/$(VENV)/share/jupyter:$$JUPYTER_PATH" "$(CURDIR)/$(VENV)/bin/python"
endif

# What depends on the version of ipykernel.
KERNEL_TESTS = tests/browser tests/exercises/test_tasks.py

.DEFAULT_GOAL := help
.PHONY: run test lab progress reset doctor record render bench site lint setup help clean

run: $(COURSE) ## start here: execute every lesson, or LESSONS=01; results in build/lessons; ARGS=--help for more
	@$(RUN) -m labkit run $(LESSONS) $(ARGS)

test: $(TEST) ## all tests; pytest's options in PYTEST_ARGS
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(IPYKERNEL),$(KERNEL_TESTS)) $(PYTEST_ARGS)

lab: $(COURSE) ## your own copy of the lessons in JupyterLab, in work/ or ARGS=FOLDER
	@$(RUN) -m labkit lab $(ARGS)

progress: $(COURSE) ## the exercises: open, tried, solved; ARGS="FOLDER FOLDER" for a line a learner
	@$(RUN) -m labkit progress $(ARGS)

reset: $(COURSE) ## begin LESSONS=01 anew: a fresh copy, yours is kept under another name
	@$(RUN) -m labkit reset $(LESSONS) $(ARGS)

doctor: $(COURSE) ## what this machine is, and what to do
	@$(RUN) -m labkit doctor $(ARGS)

record: $(COURSE) ## on a GPU, measure what lessons show and keep it on tapes; ARGS=--check lists what is stale
	@$(RUN) -m labkit record $(LESSONS) $(ARGS)

render: $(COURSE) ## without a GPU, save what lessons show from the tapes as their outputs
	@$(RUN) -m labkit render $(LESSONS) $(ARGS)

bench: $(COURSE) ## on a GPU, measure the finished kernels beside others; ARGS="affine --peers", ARGS=--help for more
	@$(RUN) -m benchmarks $(ARGS)

site: $(TEST) ## the course as pages to read, from the saved outputs, in build/site
	@$(RUN) -m sphinx -q -W --keep-going -c docs . build/site

lint: $(TEST) ## ruff, mypy and import-linter, notebooks too
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -c 'import importlinter.cli as rooms; rooms.lint_imports_command()'

setup: $(if $(filter test,$(FOR)),$(TEST),$(COURSE)) ## only set up the virtual environment; FOR=test with what the tests need
	@:

# The extra of pyproject.toml that a command needs. Without a GPU torch comes first, from PyTorch's CPU index.
$(VENV)/installed-%: pyproject.toml $(CONSTRAINTS)
	@test "$$(uname)" = Linux || { echo "labkit: Triton has packages for Linux only: docs/installing.md"; exit 2; }
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))" || { \
		echo "labkit: $(PYTHON) is not Python 3.11 to 3.14. Name one that is: make PYTHON=python3.12"; exit 2; }
	@exec 9> $(VENV).lock; flock 9 2> /dev/null; \
	if test $@ -nt pyproject.toml && test $@ -nt $(CONSTRAINTS); then exit; fi; set -e; \
	echo "labkit: installing into $(VENV), which may take some minutes"; \
	pip="$(VENV)/bin/python -m pip"; torch=$$(sed -n 's/^torch==//p' $(CONSTRAINTS)); \
	$$pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV); \
	sed '$(if $(IPYKERNEL),s/^ipykernel==.*/ipykernel==$(IPYKERNEL).0/)' $(CONSTRAINTS) > $(VENV)/constraints.txt; \
	pip="$$pip install -q --disable-pip-version-check"; build=; \
	if nvidia-smi -L 2> /dev/null | grep -q ^GPU; then build="torch!=$$torch+cpu"; \
	elif ! $$pip --no-deps --retries 1 --timeout 10 "torch==$$torch+cpu" \
		--extra-index-url https://download.pytorch.org/whl/cpu; then \
		echo "labkit: no CPU build of torch was found; the default one has several GB of CUDA packages"; fi; \
	$$pip -c $(VENV)/constraints.txt -e ".[$*]" $$build; touch $@

installed:
	@$(PYTHON) -c "import click, IPython, matplotlib, pandas, papermill, torch, triton" || { \
		echo "labkit: ENV=current installs nothing. What is missing: $(PYTHON) -m pip install -c constraints.txt -e '.[course]'"; \
		exit 2; }

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "Options, for example make run ENV=current:"
	@sed -n 's/^#   /  /p' Makefile

clean: ## remove what was built (not the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
