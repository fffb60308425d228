# Two commands on a fresh machine with Python 3.11 and make:
#   make serve   make the environment, fetch the default model, serve it on 127.0.0.1:8000
#   make test    run every test
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PLUGINS := synthetic llamacpp ledger prometheus
OLD_OPENAI := 2.9.0

.PHONY: serve test check stress bench clean env env-dev

serve: env
	@$(BIN)/tokenflow serve -c conf/tokenflow.toml

test: env-dev
	$(BIN)/python -m pytest -m "not stress" $(ARGS)

check: env-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

stress: env-dev
	$(BIN)/python -m pytest -m stress $(ARGS)

env: $(VENV)/.installed
env-dev: $(VENV)/.installed-dev .venv-openai-old/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(wildcard plugins/*/pyproject.toml) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e . $(PLUGINS:%=-e plugins/%)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --group dev --group bench
	@touch $@

# The oldest openai client that the tests promise to support, beside the newest in .venv.
.venv-openai-old/.installed: Makefile
	$(PYTHON) -m venv .venv-openai-old
	.venv-openai-old/bin/python -m pip install --quiet openai==$(OLD_OPENAI) trio
	@touch $@

clean:
	rm -rf .venv .venv-openai-old
