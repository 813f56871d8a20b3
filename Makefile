# Each command sets up what it needs first; labkit/bootstrap.py has the logic.
#   ENV=current      use the present environment: nothing is installed, what is missing is named
#   TORCH=2.11       the oldest supported torch, or 2.15 the newest, in a virtual environment of its own
#   IPYKERNEL=6.31   the older supported ipykernel, in one of its own; `test` runs panels and browser
#   PYTHON=...       the Python that the virtual environment is made of
BOOTSTRAP = $(or $(PYTHON),python3) labkit/bootstrap.py
# What depends on the version of ipykernel.
KERNEL_TESTS = tests/browser tests/widgets tests/exercises/test_lesson.py

.DEFAULT_GOAL := help
.PHONY: run test lab progress doctor record bench slides site lint setup help clean

run: ## start here: execute every lesson, or LESSONS=01; results in build/lessons; ARGS=--help for more
	@$(BOOTSTRAP) run -m labkit run $(LESSONS) $(ARGS)

test: ## all tests; pytest's options in PYTEST_ARGS
	@$(BOOTSTRAP) test -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(IPYKERNEL),$(KERNEL_TESTS)) $(PYTEST_ARGS)

lab: ## your own copy of the lessons in JupyterLab: in work/, or ARGS=FOLDER
	@$(BOOTSTRAP) lab -m labkit lab $(ARGS)

progress: ## the exercises: open, tried, solved
	@$(BOOTSTRAP) progress -m labkit progress $(ARGS)

doctor: ## what this machine is, and what to do
	@$(BOOTSTRAP) doctor -m labkit doctor $(ARGS)

record: ## on a GPU, run lessons at full size and keep what was measured; ARGS=--check, ARGS=--strip-stale
	@$(BOOTSTRAP) record -m labkit record $(LESSONS) $(ARGS)

bench: ## on a GPU, measure ours beside the other contenders; ARGS="affine --peers", ARGS=--help for more
	@$(BOOTSTRAP) bench -m labkit bench $(ARGS)

slides: ## the lessons as slides, from their saved outputs, or LESSONS=01; results in build/slides
	@$(BOOTSTRAP) slides -m labkit slides $(LESSONS) $(ARGS)

site: ## the course as pages to read, from the saved outputs, in build/site
	@$(BOOTSTRAP) site -m sphinx -q -W --keep-going -c docs . build/site $(ARGS)

lint: ## ruff, mypy and import-linter, notebooks too
	@$(BOOTSTRAP) lint -m ruff check .
	@$(BOOTSTRAP) lint -m ruff format --check .
	@$(BOOTSTRAP) lint -m mypy
	@$(BOOTSTRAP) lint -c 'import importlinter.cli as rooms; rooms.lint_imports_command()'

setup: ## only set up the virtual environment; FOR=test with what the tests need
	@$(BOOTSTRAP) $(or $(FOR),setup)

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "Options, for example make run ENV=current:"
	@sed -n 's/^#   /  /p' Makefile

clean: ## remove what was built (not the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
