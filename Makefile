# Every target sets up what it needs from nothing. `make verify` and `make test` are the two to know.
PYTHON ?= python3
VENV ?= .venv
# A pinned torch: a plain `torch` may be many GB. Any torch>=2.9 works; add an index for CPU wheels if you like.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_ARGS ?=
JOBS ?= 2

# The real SGLang has its own environment: its packages and ours would not agree on versions.
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_SETUP := PYTHONPATH=python $(PYTHON) -m sglang_aiter_moe.testing.sglang_environment --venv $(SGLANG_VENV) --torch '$(TORCH)'

.PHONY: verify test test-sglang test-in-tree serve docs lint clean

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[test,triton]'
	touch $@

verify: $(STAMP)
	$(BIN)/sglang-aiter-moe verify

# One thread a worker, and none that waits in a loop: together they would be many times slower.
test: export OMP_NUM_THREADS ?= 1
test: export OMP_WAIT_POLICY ?= PASSIVE
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(TEST_ARGS) test/registered/unit

test-sglang:
	$(SGLANG_SETUP) --all-releases
	$(SGLANG_BIN)/python -m pytest -v $(TEST_ARGS) --ignore-glob='*/test_in_tree*' test/registered/e2e

# The patch set applied to SGLang's source: 0.5.17, 0.5.20 and 0.5.23, without the plugin, and back.
test-in-tree:
	$(SGLANG_SETUP) --all-releases
	$(SGLANG_BIN)/python -m pytest -v $(TEST_ARGS) test/registered/e2e/test_in_tree.py test/registered/e2e/test_in_tree_edits.py

serve:
	$(SGLANG_SETUP)
	$(SGLANG_BIN)/python -m sglang_aiter_moe.testing.serve_once $(SERVE_ARGS)

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(STAMP)
	$(BIN)/python -m pip install --quiet pre-commit
	$(BIN)/pre-commit run --all-files

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info
