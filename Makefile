# make simulate: install into .venv, run the default audit on Flower's simulation runtime.
# make test:     install into .venv, run the tests (CI also checks the types of every call).
# make docs:     write the documentation as a site into .site.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

.PHONY: simulate test lint docs clean

simulate: $(INSTALLED)
	$(BIN)/python simulations/run.py $(ARGS) engine=ray

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch comes first and alone: where pip finds a CPU build of the pinned version it is taken,
# and torchvision's requirement is then met by it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, got {v[0]}.{v[1]}; use make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(INSTALLED)

# The documentation as a site in .site; needs the extra docs.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf .site $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
