# Everything a developer or a curious reader does here. `make` alone lists it.
#
# The virtual environment is built from requirements.lock, every file checked by its hash, and built again when the
# lock's content changes (not its date: a checkout touches dates). Nothing is installed outside .venv, except what
# Debian keeps in packages of its own (python3-venv, Java), and that only as root; otherwise the command is printed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Without compiled modules, every node that a test starts would compile all of walstream first: half of its start.
unexport PYTHONDONTWRITEBYTECODE

# The newest Python that runs: a name on the PATH may be a stub of a version manager that starts nothing.
PYTHON ?= $(shell for v in 3.13 3.12 3.11 3; do \
	python$$v -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo python$$v && break; done)

VENV := .venv
BIN := $(VENV)/bin
hash = $(shell sha256sum $(1) 2>/dev/null | cut -c1-16)
LOCKED := $(VENV)/.locked-$(call hash,requirements.lock)
READY := $(VENV)/.ready-$(call hash,pyproject.toml)
# As many as the cores of a small machine: one worker has the tests with a JVM, which takes what the other one leaves.
PYTEST := $(BIN)/pytest -q -n 2 -rs

.PHONY: help
help: ## list the targets
	@echo "walstream: make <target>"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16 | sed 's/^/  /'

.PHONY: demo
demo: $(READY) java ## PostgreSQL to lakehouse tables, killed in the middle, compared at the end (two minutes)
	@$(BIN)/walstream demo

.PHONY: test
test: $(READY) java kcat ## run the tests, with a fixed slice of the long rounds (forty minutes on two cores)
	$(PYTEST) -m "not long"

.PHONY: test-fast
test-fast: $(READY) ## run the tests that start no server and no JVM
	$(PYTEST) -m "fast and not long"

.PHONY: test-long
test-long: $(READY) java kcat ## run everything, the long rounds in full (hours)
	WALSTREAM_TEST_ROUNDS=full $(PYTEST)

.PHONY: lint
lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(READY) ## put the code into its format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(READY) ## write the pages that are generated: docs/configuration.md
	$(BIN)/walstream config reference > docs/configuration.md

.PHONY: schemas
schemas: $(READY) ## write the schemas of Kafka's messages from kio: src/walstream/node/schemas.json
	PYTHONPATH=src:tests $(BIN)/python tests/node/kio_schemas.py > $(VENV)/schemas.json
	mv $(VENV)/schemas.json src/walstream/node/schemas.json

.PHONY: proto
proto: $(READY) ## write the feed's messages from wal.proto: src/walstream/feed/wal_pb2.py and .pyi
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/walstream/feed/wal.proto

.PHONY: sim
sim: $(READY) ## simulate 300 clusters and 300 stores in trouble and check every promise (90 seconds)
	$(BIN)/walstream sim --seeds 0:300 --keep tests/seeds

# Broken off, it says with which SEEDS to go on.
SEEDS ?= 0:30000
.PHONY: sim-long
sim-long: $(READY) ## the same with tens of thousands, over two processes (SEEDS=FIRST:END)
	$(BIN)/walstream sim --seeds $(SEEDS) --processes 2 --keep tests/seeds

.PHONY: bench-log
bench-log: $(READY) ## measure produce, fetch and acknowledgement latency next to this machine's limits
	$(BIN)/python bench/log.py

.PHONY: bench-capture
bench-capture: $(READY) ## measure capture next to pg_recvlogical, its latency at a steady pace, its memory
	$(BIN)/python bench/capture.py

.PHONY: bench-pipeline
bench-pipeline: $(READY) java ## measure the pipeline next to Spark's own writing, its freshness, its cost as tables grow
	$(BIN)/python bench/pipeline.py

.PHONY: bench-replication
bench-replication: $(READY) ## measure three nodes next to a single one: produce, acknowledgement, lag, catch-up, memory
	$(BIN)/python bench/replication.py

.PHONY: bench-feed
bench-feed: $(READY) ## measure the feed next to a Kafka consumer: catch-up, live, 1 to 100 subscribers, latency, memory
	$(BIN)/python bench/feed.py

.PHONY: bench-fsync
bench-fsync: $(READY) ## measure what fsync costs from 1 to 512 partitions per flush
	$(BIN)/python bench/fsync.py

.PHONY: venv
venv: $(READY) ## build the virtual environment (the other targets do it by themselves)

.PHONY: lock
lock: $(READY) ## choose the newest dependencies that pyproject.toml allows and write requirements.lock
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header \
		--no-emit-index-url --no-emit-find-links --group dev --extra feed --extra spark \
		--output-file requirements.lock pyproject.toml

.PHONY: java
java: ## look for Java, which Spark needs, and install it when root
	@if ! command -v java >/dev/null && [ -z "$${JAVA_HOME:-}" ]; then $(call debian,default-jre-headless); fi

.PHONY: kcat
kcat: # One of the Kafka clients that tests use. Who cannot install it does without: those tests are skipped, and say so.
	@if ! command -v kcat >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then $(call debian,kcat) || true; fi

.PHONY: clean
clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs a Debian package as root; otherwise says what to type, and stops.
define debian
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "installing $(1)" >&2; \
	apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(1) >/dev/null; \
else \
	echo "$(1) is missing. Install it with:  sudo apt-get install $(1)" >&2; exit 1; \
fi
endef

$(LOCKED):
	@$(PYTHON) -c '' 2>/dev/null || { echo "Python 3.11 or newer is missing. Install it with:  sudo apt-get install python3 python3-venv" >&2; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(call debian,$(notdir $(PYTHON))-venv); fi
	@echo "building $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

$(READY): $(LOCKED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-* && touch $@
