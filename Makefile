# Every target sets up what it needs first, and setting up twice costs nothing: `make help`.

PYTHON ?= python3
ARGS ?=
BENCH ?= bench/run.py
TESTS := $(if $(PEERS),test-peers) test-default test-triton-0 test-triton-1 test-reference test-levels

venv := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help train test $(TESTS) test-peers lint bench bench-peers bench-linear gpu clean

help:
	@echo "make train   run the demo: SFT, reward model and PPO on real text; ARGS='...' is passed to ppo-train demo"
	@echo "make test    run the tests on every backend and instruction-set level of this machine; PEERS=1: test-peers too"
	@echo "make test-peers   compare with the releases of other trainers, which are installed in .venv-peers"
	@echo "make lint    check style and types"
	@echo "make bench   run the benchmarks; ARGS='...' is passed to $(BENCH)"
	@echo "make bench-peers  the same beside the released packages of other trainers"
	@echo "make bench-linear  the loss from hidden states beside its matrix products and other fused heads"
	@echo "make gpu     run the tests and the benchmark on a CUDA device, with $(PYTHON) as it is; ARGS=--dry tries it without"
	@echo "make clean   remove what was built and the caches; .venv and runs stay"
	@echo "PYTHON=python3.12 before the first run chooses the Python (3.10 or newer) of .venv"

# The environment: made again when it is missing or broken, installed again when the pins change.
.venv/.installed: pyproject.toml setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1): 3.10 or newer is needed; say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(venv) -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { echo "setup: creating .venv"; $(PYTHON) -m venv --clear .venv; }
	@echo "setup: installing the pinned dependencies into .venv (some minutes the first time)"
	@$(venv) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The native libraries: compiled again when a source changed. Without a compiler this warns, every time, and goes on.
.venv/.native: .venv/.installed $(wildcard csrc/*)
	@echo "setup: building the native libraries"
	@$(venv) setup.py --quiet build_ext --inplace
	@! ls ppo_kernels/_native_*.so >/dev/null 2>&1 || touch $@

# OMP_WAIT_POLICY: threads wait without spinning; on a machine that does other work too, they would wait for each other.
train: .venv/.native
	@echo "train: ppo-train demo $(ARGS)"
	@OMP_WAIT_POLICY=PASSIVE .venv/bin/ppo-train demo $(ARGS)

# The default backend runs everything; every other backend must give the same numbers, so it runs the tests of semantics:
# plain PyTorch, each lower instruction-set level, and the Triton kernels in Triton's interpreter. Two run at a time.
test: export OMP_WAIT_POLICY = PASSIVE
test: .venv/.native
	@$(MAKE) --no-print-directory -j2 --output-sync=target $(TESTS)

test-default: .venv/.native
	@echo "test: everything, default backend"
	@$(venv) -m pytest -q tests

test-reference: .venv/.native
	@echo "test: semantics, reference backend"
	@PPO_KERNELS_BACKEND=reference $(venv) -m pytest -q tests/semantics

test-triton-0 test-triton-1: test-triton-%: .venv/.native
	@echo "test: semantics, Triton kernels in the interpreter, half $*"
	@TRITON_INTERPRET=1 PPO_KERNELS_BACKEND=triton PPO_KERNELS_TEST_SHARD=$*/2 \
	    $(venv) -m pytest -q tests/semantics tests/triton tests/test_ops.py

test-levels: .venv/.native
	@runnable=$$($(venv) -m ppo_kernels.doctor --levels) && best=$$(echo "$$runnable" | sort | tail -n 1) && \
	for library in ppo_kernels/_native_*.so; do \
	    [ -e "$$library" ] || continue; \
	    level=$${library#*_native_}; level=$${level%.so}; \
	    if ! echo "$$runnable" | grep -qx "$$level"; then echo "test: semantics, native $$level: skipped, this machine cannot run it"; \
	    elif [ "$$level" != "$$best" ]; then \
	        echo "test: semantics, native $$level"; \
	        PPO_KERNELS_ISA=$$level $(venv) -m pytest -q tests/semantics || exit 1; \
	    fi; \
	done

# Other trainers' releases have pins of their own, so they live apart. The second file is installed without
# dependencies: those are CUDA packages and servers that the functions compared do not use.
.venv-peers/.installed: constraints.txt $(wildcard tests/peers/requirements*.txt)
	@echo "setup: installing the peers' packages into .venv-peers (some minutes the first time)"
	@$(PYTHON) -m venv --clear .venv-peers
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -r tests/peers/requirements.txt
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r tests/peers/requirements-nodeps.txt
	@touch $@

test-peers: .venv-peers/.installed .venv/.native
	@echo "test: the same numbers as verl, OpenRLHF, TRL, Liger, torchrl and rsl_rl"
	@PYTHONPATH=. HF_HUB_OFFLINE=1 TRITON_INTERPRET=1 .venv-peers/bin/python -m pytest -q tests/peers

bench-peers: .venv-peers/.installed .venv/.native
	@PYTHONPATH=. .venv-peers/bin/python bench/peers.py

bench-linear: .venv-peers/.installed .venv/.native
	@PYTHONPATH=. .venv-peers/bin/python bench/linear.py

lint: .venv/.native
	@echo "lint: ruff check, ruff format, mypy"
	@$(venv) -m ruff check --quiet .
	@$(venv) -m ruff format --quiet --check .
	@$(venv) -m mypy

bench: .venv/.native
	@echo "bench: $(BENCH) $(ARGS)"
	@$(venv) $(BENCH) $(ARGS)

# With the machine's own Python and its torch: no set-up. It builds the native library and keeps to ten minutes.
gpu:
	@echo "gpu: bench/gpu.py $(ARGS)"
	@$(PYTHON) bench/gpu.py $(ARGS)

clean:
	@echo "clean: build products and caches"
	@rm -rf build dist *.egg-info .venv/.native ppo_kernels/_native_*.so
	@rm -rf .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find ppo_kernels tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
