# kvmesh. `make demo` and `make test` set up what they need and are quick to run again.

PYTHON ?= python3
BIN := .venv/bin
SETUP := $(PYTHON) deploy/setup/setup.py
PROTOS := $(wildcard proto/mesh/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help demo up test check soak setup dev proto clean

help: ## This list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: setup ## Set up, bring a mesh up, take the six-step tour, take it down
	@$(BIN)/kvmesh demo

up: setup ## The same mesh, left running in the foreground
	@$(BIN)/kvmesh up

test: ## Set up what the tests need (Consul included) and run them all
	@.ci/run

check: dev ## Lint, types, import contracts, wire contract, fast unit tests
	@$(BIN)/pytest -q -n 2 --dist loadscope -m "not model and not consul and not e2e and not soak"

soak: dev ## The long counts
	@$(BIN)/pytest -m soak

setup:
	@$(SETUP)

dev:
	@$(SETUP) --dev

proto: dev ## Write the stubs in mesh/v1 from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

clean: ## Remove .venv, local state and caches of this clone (the compiled llama.cpp in ~/.cache stays)
	@rm -rf .venv .kvmesh build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
