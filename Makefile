# Two commands do everything on a fresh machine: `make serve` and `make test`.
# The environment lives in .venv; stamps keep a second call quick.
PYTHON ?= python3
MODEL  ?= smollm2
PORT   ?= 8000
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
# pip prints its own log only when it fails.
QUIET   = > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }

.PHONY: serve test check test-clients parity bench bench-peers bench-all clean
.DELETE_ON_ERROR:

serve: $(VENV)/.core
	@$(BIN)/noria serve $(MODEL) --port $(PORT)

# All of it; PYTEST_ARGS="tests/unit -k gguf" runs what it names and no clients.
test: check
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
	@$(if $(PYTEST_ARGS),,$(MAKE) --no-print-directory test-clients)

check: $(VENV)/.dev
	@$(BIN)/ruff check src tests benchmarks tools
	@$(BIN)/ruff format --check -q src tests benchmarks tools
	@$(BIN)/mypy
	@$(BIN)/lint-imports > $(VENV)/lint.log 2>&1 || { cat $(VENV)/lint.log; exit 1; }
	@$(BIN)/python tools/check_sizes.py

# The clients that people bring, in an environment of their own, against `noria serve` with the demo model.
test-clients: .venv-clients/.ready
	@NORIA_PYTHON=$(BIN)/python .venv-clients/bin/python -m pytest tests/clients --disable-warnings $(PYTEST_ARGS)

# Live against transformers and PyTorch, in an environment of its own; rewrites the stored outputs that `make test` checks.
parity: .venv-parity/.ready
	@.venv-parity/bin/python tests/parity/make_oracle.py

bench: $(VENV)/.core
	@$(BIN)/python benchmarks/run_presets.py --model $(MODEL)

# Beside llama.cpp, vLLM, OpenVINO GenAI and transformers, each in an environment of its own under build/peers: several GB
# and hours. PEERS_ARGS="--help" shows how to take less of it.
bench-peers: $(VENV)/.core
	@PYTHONPATH=benchmarks $(BIN)/python -m peers --model $(MODEL) $(PEERS_ARGS)

# Everything that benchmarks/RESULTS.md shows, unattended; the engines of bench-peers must have been made before.
bench-all: $(VENV)/.dev
	@$(BIN)/python benchmarks/measure_all.py --model $(MODEL) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venv-parity .venv-clients build

$(VENV)/bin/python:
	@echo "Making the environment in $(VENV) …"
	@$(PYTHON) -c 'import sys; sys.exit("Noria needs Python 3.10 or later, this is " + sys.version.split()[0]) if sys.version_info < (3, 10) else None'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(NATIVE) | $(VENV)/bin/python
	@echo "Building Noria's kernels and installing it (a minute or two the first time) …"
	@{ $(BIN)/pip install "scikit-build-core>=0.10" "nanobind>=2.4" ninja && \
	   { command -v cmake > /dev/null || $(BIN)/pip install "cmake>=3.20"; } && \
	   PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --no-build-isolation -e . ; } $(QUIET)
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing what the tests need …"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --no-build-isolation -e '.[dev]' $(QUIET)
	@touch $@

# torch is pinned: an unpinned one downloads several GB of CUDA.
.venv-parity/.ready: $(VENV)/.dev
	@echo "Making the parity environment in .venv-parity (PyTorch, transformers) …"
	@$(PYTHON) -m venv .venv-parity
	@.venv-parity/bin/pip install -q torch==2.13.0 transformers accelerate
	@PATH="$(CURDIR)/$(BIN):$$PATH" .venv-parity/bin/pip install -q "scikit-build-core>=0.10" "nanobind>=2.4"
	@PATH="$(CURDIR)/$(BIN):$$PATH" .venv-parity/bin/pip install -q --no-build-isolation -C build-dir=build/parity -e '.[dev]'
	@touch $@

# --no-compile: most of what lm-eval brings is never imported.
.venv-clients/.ready: tests/clients/requirements.txt | $(VENV)/.core
	@echo "Making the clients' environment in .venv-clients (openai, LiteLLM, LangChain, lm-eval, schemathesis) …"
	@$(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/pip install --no-compile -r $< > .venv-clients/install.log 2>&1 || { cat .venv-clients/install.log; exit 1; }
	@touch $@
