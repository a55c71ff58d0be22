# Each target does all of its own set-up on a machine with git, python3, make and a C++ compiler.
#   make demo                   a real model completes a prompt twice; the second time its prefix is reused
#   make test                   lint, types, layers, then every test and doctest on the installed package
#   make test COVERAGE=1        the same, with branch coverage
#   make test PYTEST_ARGS="-k causal"
#   make bench                  all measurements, printed and kept in benchmarks/results/
#   make bench BENCH=put        one of them: attention, put, shift, bookkeeping, serving
#   make bench-peers            environments of vLLM and llama.cpp, which are then measured beside us
#   make sanitize               the CPU kernel's tests under address and undefined-behaviour sanitizers
#   make format                 let ruff rewrite the sources
VENV ?= .venv
PYTHON ?= python3
PROMPT ?= Once upon a time
PYTEST_ARGS ?=
BENCH ?= all
NOTE ?=

bin := $(VENV)/bin
# Bytecode is made of what is imported, when it is. Made of everything it took 42 of 93 seconds, and saved 10 of the first import.
pip := $(bin)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# Two processes, for two cores; a file stays in one, with what its tests share, and files come in their order, in which the
# long ones are not last. A process that dies is not replaced: pytest would wait for ever for its tests.
pytest := $(bin)/python -m pytest --config-file=pyproject.toml -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Folders too, so that a removed or renamed file counts as a change.
sources := $(shell find src -name __pycache__ -prune -o -print)
coverage := $(if $(COVERAGE),--cov=kvcache --cov-report=term-missing)

.PHONY: help demo test bench bench-peers sanitize format clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,/^[^#]/s/^# *//p' Makefile

demo: $(VENV)/.installed-demo
	$(bin)/kvcache run demo --prompt "$(PROMPT)" --prompt "$(PROMPT) there was a king" --max-tokens 48

# pytest comes last, so that its summary is the last line. --pyargs kvcache: doctests of the installed package.
test: $(VENV)/.installed-dev
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/lint-imports
	$(pytest) $(coverage) $(PYTEST_ARGS) --pyargs kvcache tests docs README.md

bench: $(VENV)/.installed-demo
	$(bin)/kvcache bench $(BENCH) --json benchmarks/results/$(BENCH).json \
	  $(if $(filter all attention,$(BENCH)),--plot benchmarks/results/attention.svg) $(if $(NOTE),--note "$(NOTE)")

bench-peers:
	PYTHON=$(PYTHON) benchmarks/peers.sh

# The sanitizers' runtimes must come before everything else in the process, and PyTorch leaks on purpose. They do not see
# what the tile unit reads: plain loops stand for it.
sanitize: $(VENV)/.installed-dev
	KVCACHE_HOME=build/sanitize \
	KVCACHE_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g -DKVCACHE_EMULATE_AMX" \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 OPENBLAS_NUM_THREADS=1 \
	$(pytest) -q tests/test_kernels_cpu.py tests/contracts/test_kernels.py tests/test_fused.py tests/test_linears.py

format: $(VENV)/.installed-dev
	$(bin)/ruff check --fix
	$(bin)/ruff format

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras. pip builds the wheel anew and replaces an installed kvcache of the same version.
$(VENV)/.installed-demo: $(VENV)/bin/python pyproject.toml constraints.txt $(sources)
	@echo 'installing kvcache, PyTorch and transformers into $(VENV): a minute or two'
	$(pip) '.[demo,cli]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt $(sources)
	@echo 'installing kvcache, PyTorch, transformers and the tools of the tests into $(VENV): a minute or two'
	$(pip) '.[dev]'
	@touch $@
