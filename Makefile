# Everyday commands, each of which works from a bare clone with nothing but Python >= 3.11.
#   make demo                           serve the embedded model under a small load for a minute
#   make serve ARGS="--port 9000"       serve the embedded model
#   make test ARGS="tests/kv -x"        run the tests, WORKERS=2 files at a time
#   make test-all                       run these and the exhaustive ones; fetches a real model and Ray
#   make test-clients ARGS="llm aider"  run clients from PyPI against a server, each in an environment of its own
#   make pages                          write the pages of docs/ that are made from code
#   make docs                           build the documentation's site into site/
#   make release                        build, check and upload the package; needs credentials (.ci/release.py)
#   make lint | types | clean
# PYTHON=python3.12 picks the interpreter, PIP_ARGS passes options to pip (another index, for example).

PYTHON ?=
PIP_ARGS ?=
ARGS ?=
WORKERS ?= 2
EXTENSION := setup.py roseinfer/kernels/cpu/rows.c
VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)

TESTS = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo serve test test-all test-clients pages docs release lint types clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.installed
	$(BIN)/roseinfer demo $(ARGS)

serve: $(VENV)/.installed
	$(BIN)/roseinfer serve $(ARGS)

test: $(VENV)/.installed-dev
	$(TESTS) -m "not exhaustive" $(ARGS)

test-all: $(VENV)/.installed-dev
	.ci/fetch_model
	.ci/fetch_ray
	$(TESTS) $(ARGS)

test-clients: $(VENV)/.installed
	$(BIN)/python -m benchmarks.clients $(ARGS)

pages: $(VENV)/.installed
	$(BIN)/python .ci/cli_reference.py
	$(BIN)/python .ci/python_reference.py
	$(BIN)/python .ci/vllm_table.py

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: $(VENV)/.installed-release
	$(BIN)/python .ci/release.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_writing.py

types: $(VENV)/.installed-dev
	$(BIN)/mypy --num-workers $(WORKERS)

clean:
	rm -f roseinfer/kernels/cpu/*.so
	rm -rf $(VENV) .clients build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than pyproject.toml once what it asks for is installed, with the compiled functions.
$(VENV)/.installed: pyproject.toml $(EXTENSION) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(EXTENSION) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -e '.[dev,docs]'
	@touch $(VENV)/.installed $(VENV)/.installed-docs $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -e '.[docs]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-release: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -e '.[release]'
	@touch $(VENV)/.installed $@

$(BIN)/python:
	@for python in $(CANDIDATES); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating $(VENV) with $$("$$python" --version)"; \
	        "$$python" -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "roseinfer: $$python cannot create a virtual environment; is its venv package installed?" >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "roseinfer needs Python 3.11 or newer, and none of these is: $(CANDIDATES)." >&2; \
	echo "Install one, or name yours: make PYTHON=/path/to/python ..." >&2; \
	exit 1
