# The two commands of the README are `make demo` and `make test`. Each makes
# the virtual environment when it is missing and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
PROCESSES ?= auto
BIN = $(VENV)/bin
RUFF = $(BIN)/ruff
SOURCES = accum_model benchmarks docs tests setup.py
RUFF_RULES = --line-length 80 --select E,F,W,I,B,UP,D1 \
	--ignore D105,D107 \
	--config 'lint.isort.force-single-line=true' \
	--config 'lint.per-file-ignores={"tests/*"=["D1","E731"],"setup.py"=["D1"],"*/__init__.py"=["E402"]}'
PYTEST = $(BIN)/python -m pytest -n $(PROCESSES) --maxprocesses 4

# The oldest releases that are supported, on the oldest Python that is there.
OLDEST_VENV ?= .venv-oldest
OLDEST = "tensorflow==2.18.*" "keras==3.8.*"
OLDEST_PYTHON ?= $(shell python3.10 -c "" 2>/dev/null && echo python3.10 || echo $(PYTHON))

.PHONY: demo test test-slow test-all test-oldest docs lint format clean

demo: $(VENV)/.installed-demo
	$(BIN)/python -m accum_model

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow

test-all: $(VENV)/.installed-test
	$(PYTEST)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest -n $(PROCESSES) --maxprocesses 4 -m core

$(OLDEST_VENV)/.installed: setup.cfg
	@test -x $(OLDEST_VENV)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST_VENV)/bin/python -m pip install --quiet --editable . $(OLDEST) \
		pytest pytest-xdist hypothesis docutils
	@touch $@

lint: $(VENV)/.installed-test
	$(RUFF) format --check --line-length 80 $(SOURCES)
	$(RUFF) check $(RUFF_RULES) $(SOURCES)

format: $(VENV)/.installed-test
	$(RUFF) check --fix $(RUFF_RULES) $(SOURCES)
	$(RUFF) format --line-length 80 $(SOURCES)

$(VENV)/.installed-%: setup.cfg
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build dist docs/_build *.egg-info \
		.pytest_cache .ruff_cache .hypothesis
