# The one way to build, check, generate and test. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rlmesh
export CARGO_TARGET_DIR ?= $(CACHE)/target
BIN := $(CARGO_TARGET_DIR)/debug
# The SDK's crates declare a newer Rust than they need.
CARGO := cargo
FLAGS := --locked --ignore-rust-version

# Built once per machine and version: walls between crates, licences, sources (deny.toml).
DENY_VERSION := 0.20.2
CARGO_DENY := $(CACHE)/tools/cargo-deny-$(DENY_VERSION)/bin/cargo-deny

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: needs
needs: ## check that this machine has what building needs (installs it as root on Debian)
	@scripts/needs.sh

.PHONY: venv
venv: needs ## make the private Python environments
	@scripts/venv.sh scripts/python/requirements.txt
	@scripts/venv.sh scripts/python/requirements-test.txt

.PHONY: build
build: needs ## build every program
	$(CARGO) build $(FLAGS) --workspace --bins

.PHONY: demo
demo: needs ## evaluate real models in real environments, and print the results
	@python="$$(scripts/venv.sh scripts/python/requirements.txt)/bin/python"; \
	$(MAKE) --no-print-directory build && bin="$(BIN)" python="$$python" scripts/demo.sh

.PHONY: check
check: needs $(CARGO_DENY) ## formatting, lints, walls between crates
	$(CARGO) fmt --check
	$(CARGO_DENY) --offline check --hide-inclusion-graph bans licenses sources
	$(CARGO) clippy $(FLAGS) --workspace --all-targets -- -D warnings
	scripts/check-text.sh

$(CARGO_DENY):
	$(CARGO) fetch $(FLAGS:--ignore-rust-version=)
	$(CARGO) install cargo-deny --version $(DENY_VERSION) --locked --root $(CACHE)/tools/cargo-deny-$(DENY_VERSION) --target-dir $(CACHE)/tools/build
	rm -rf $(CACHE)/tools/build

.PHONY: format
format: ## format the code
	$(CARGO) fmt

TEST_ENV = RLMESH_TEST_PYTHON="$$(scripts/venv.sh scripts/python/requirements.txt)/bin/python" RLMESH_TEST_BIN="$(BIN)" \
	RLMESH_TEST_VENV="$$(scripts/venv.sh scripts/python/requirements-test.txt)" RLMESH_BED_TOOLS="$$(cat $(BED_TOOLS))"

# Where each program of the test bed is; on a machine that can't have one that of Helm alone, or nothing. Tests that need more
# say why they are skipped.
BED_TOOLS := $(CACHE)/tools/bed

.PHONY: bed-tools
bed-tools: needs
	@mkdir -p $(CACHE)/tools
	@if [ "$$(id -u)" = 0 ]; then scripts/bed-tools.sh; elif command -v go >/dev/null; then scripts/bed-tools.sh helm || true; fi >$(BED_TOOLS).new && mv $(BED_TOOLS).new $(BED_TOOLS)

.PHONY: bed
bed: build ## start a real Kubernetes of two nodes on this machine, without an uplink
	$(BIN)/bed up

.PHONY: bed-shell
bed-shell: ## a shell inside it
	$(BIN)/bed shell

.PHONY: bed-down
bed-down: ## end it
	$(BIN)/bed down

.PHONY: test
test: check build bed-tools ## everything: lints, unit tests, examples, control plane, agent, runner, Kubernetes, whole installations, the demo
	"$$(scripts/venv.sh scripts/python/requirements-test.txt)/bin/python" -m pytest -q -p no:cacheprovider examples/tests
	$(TEST_ENV) $(CARGO) test $(FLAGS) --workspace
	@if [ -x /usr/lib/postgresql/15/bin/initdb ]; then set -x; \
		RLMESH_TEST_STORE=postgres $(CARGO) test $(FLAGS) --workspace --test it; \
	else echo 'The control plane on PostgreSQL: skipped, because PostgreSQL 15 is not installed'; fi
	$(MAKE) demo

.PHONY: generate
generate: ## regenerate the request reference, the custom resources and what the chart renders
	UPDATE=1 $(CARGO) test $(FLAGS) --workspace --test request_suite
	UPDATE=1 $(CARGO) test $(FLAGS) --workspace --lib crd::
	UPDATE=1 RLMESH_BED_TOOLS="$$(scripts/bed-tools.sh helm)" $(CARGO) test $(FLAGS) --workspace --test chart_render the_texts

RELEASE_BIN := $(CARGO_TARGET_DIR)/release
BENCH = RLMESH_TEST_BIN="$(RELEASE_BIN)" RLMESH_TEST_PYTHON="$$(scripts/venv.sh scripts/python/requirements.txt)/bin/python" \
	$(CARGO) bench $(FLAGS) --workspace --bench

.PHONY: build-release
build-release: needs
	$(CARGO) build $(FLAGS) --release --workspace --bins

.PHONY: bench
bench: bench-runner bench-spool bench-rows bench-memory bench-controller ## every figure

.PHONY: bench-runner
bench-runner: needs ## figures of the runner, beside its peers
	$(BENCH) runner

.PHONY: bench-spool
bench-spool: needs ## figures of the agent's spool
	$(BENCH) spool

.PHONY: bench-rows
bench-rows: build-release ## figures of an evaluation of 1,000,000 rows
	$(BENCH) rows

.PHONY: bench-memory
bench-memory: build-release ## idle memory of server and agent
	$(BENCH) memory

.PHONY: bench-controller
bench-controller: build-release bed-tools ## figures of evaluations as pods, on a real Kubernetes (root)
	export RLMESH_BED_TOOLS="$$(cat $(BED_TOOLS))"; \
	RLMESH_KWOK="$$(scripts/bed-tools.sh kwok | cut -d ' ' -f 2)" $(BENCH) controller; \
	$(BENCH) pods
