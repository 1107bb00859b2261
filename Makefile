# Every target makes or refreshes .venv by itself; `make` alone prints this help.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
override VENV := .venv
override BIN := $(VENV)/bin
override READY := $(VENV)/.ready
override PIP = $(BIN)/python -m pip install --disable-pip-version-check
override IMPORTS = $(BIN)/lint-imports --no-logo
override DOWNLOAD = $(BIN)/python -m pip download --disable-pip-version-check --dest $(VENV)/share/cdgrab

# What is given on the command line becomes a quoted word of a shell command: nothing in it may end the quotes.
override GIVEN := SIZE SEEDS CELLS EPOCHS WORKERS NPROC JOBS REPLICAS TRACKER DATA SORTERS BENCH FOR SEED INPUTS MAKECMDGOALS
override QUOTE := '
override DOLLAR := $$
override define NEWLINE


endef
$(foreach name,$(GIVEN),$(foreach bad,QUOTE DOLLAR NEWLINE,$(if $(findstring $($(bad)),$(value $(name))),\
  $(error $(name) must not hold quotes, dollar signs or line ends))))

# SIZE=smoke SEEDS=2 EPOCHS=5 WORKERS=8 NPROC=4 DATA=embedded on the command line become options
override OPTIONS = $(if $(SEEDS),--seeds '$(SEEDS)') $(if $(EPOCHS),--epochs '$(EPOCHS)') $(if $(WORKERS),--workers '$(WORKERS)') \
          $(if $(SIZE),--size '$(SIZE)') $(if $(NPROC),--nproc '$(NPROC)') $(if $(JOBS),--jobs '$(JOBS)') \
          $(if $(REPLICAS),--replicas '$(REPLICAS)') $(if $(TRACKER),--tracker '$(TRACKER)') $(if $(DATA),--data '$(DATA)')

override KERNELS = $(addprefix tests/test_,kernels.py kernel_ties.py sorters.py sketches.py order_server.py balance.py)

.PHONY: help setup test lint bench soak fuzz sanitise figures report check-results docs docs-serve package clean

help: ## this list
	@echo "usage: make TARGET [SIZE=smoke|quick|paper] [SEEDS=n] [EPOCHS=n] [WORKERS=n] [NPROC=n] [JOBS=n] [REPLICAS=n] [DATA=auto|embedded] [TRACKER=tensorboard|wandb|mlflow]"; echo
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^study-%:/study-<name>:/; s/%:/<task>:/; s/:[^#]*## */\t/' | awk -F'\t' '{printf "  %-20s %s\n", $$1, $$2}'
	@echo; echo "tasks: lr-hmda lstm-wiki2 mlp-m4 cifar10 gpt2-wiki103 glue; reproduce-all takes them in turn"
	@echo "studies: $$(basename -s .yaml configs/study/*.yaml | tr _ - | xargs)"

setup: $(READY) ## make or refresh .venv (done by every other target when needed)

$(READY): requirements.lock requirements-no-deps.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) must be Python 3.11 or newer; set PYTHON=" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment; install its venv module" >&2; exit 1; }
	@echo "installing packages into $(VENV) (once; some minutes)"
	@test -t 1 || quiet=--quiet; $(PIP) $${quiet:-} -r requirements.lock
	@$(PIP) --quiet --no-deps -r requirements-no-deps.lock
	@# its source distribution carries the embedded sentences of GLUE, its wheel does not
	@$(DOWNLOAD) --quiet --no-deps --no-build-isolation --no-binary vaderSentiment vaderSentiment==3.3.2
	@$(PIP) --quiet --no-deps --no-build-isolation -e .
	@touch $@

test: $(READY) ## lint and all tests
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(IMPORTS) && $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-multinode: $(READY) ## a rank is killed, one stands still; one run on two hosts, network namespaces of this machine: needs root
	@$(BIN)/python -m pytest tests/system/test_elastic.py tests/system/test_multinode.py -rs

test-slurm: $(READY) ## runs through a one-node Slurm (Debian's slurm-wlm and munge); needs root
	@$(BIN)/python -m pip install --quiet hydra-submitit-launcher==1.2.0
	@$(BIN)/python -m pytest tests/system/test_slurm.py -rs

lint: $(READY) ## ruff, check and format; import-linter: which room may import which
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(IMPORTS)

reproduce-%: $(READY) ## all runs of a task's figures, the figures and a table: results/trial/figures; the paper's size on real data: results/figures
	@$(BIN)/python -m scripts.reproduce '$*' $(OPTIONS)

study-%: $(READY) ## a study: its results, notebook, figures and verdicts (STUDIES.md) under results/trial; SIZE=paper: under results/
	@$(BIN)/python -m experiments.study 'study=$(subst -,_,$*)' $(if $(SIZE),'size=$(SIZE)') $(if $(SEEDS),'study.seeds=$(SEEDS)') $(if $(SORTERS),'study.sorters=[$(SORTERS)]') $(if $(CELLS),'study.only=[$(CELLS)]') $(if $(JOBS),'jobs=$(JOBS)') $(if $(DATA),'data=$(DATA)')

data-%: $(READY) ## download a task's dataset into CDGRAB_DATA or ./data, checked
	@$(BIN)/python -m scripts.get_data '$*'

bench: $(READY) ## what coordinated ordering costs, with figures: results/trial, SIZE=full: results/; SIZE=smoke|quick|full, BENCH=balance …
	@$(BIN)/python -m scripts.bench $(if $(BENCH),'$(BENCH)') $(if $(SIZE),--size '$(SIZE)')
	@$(if $(filter full,$(SIZE)),,CDGRAB_BENCH=$${CDGRAB_BENCH:-results/trial/bench} CDGRAB_FIGURES=results/trial/figures )\
	$(BIN)/python -m scripts.notebook $(if $(filter full,$(SIZE)),--in-place) overhead fig8_memory

soak: $(READY) ## disturb and resume runs and scripts at random for ten minutes, against undisturbed ones; FOR=seconds, SEED=…
	@$(BIN)/python -m scripts.soak $(if $(FOR),--seconds '$(FOR)') $(if $(SEED),--seed '$(SEED)')

fuzz: $(READY) ## ten thousand bad settings, files, archives, gradients, states and calls; INPUTS=…, SEED=…
	@$(BIN)/python -m scripts.fuzz $(if $(INPUTS),--inputs '$(INPUTS)') $(if $(SEED),--seed '$(SEED)')

sanitise: $(READY) ## the tests of the compiled kernels with every index checked (numba); takes minutes
	@folder=$$(mktemp -d); NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$$folder $(BIN)/python -m pytest -n 2 $(KERNELS); status=$$?; rm -rf $$folder; exit $$status

figures: $(READY) ## redraw all figures from results/, trials left out, by executing the notebooks in place
	@$(BIN)/python -m scripts.notebook --in-place

report: $(READY) ## every claim of the papers beside ours, results/PAPER.md; the tables of README.md and docs/; all runs in one table, results/REPORT.md; all on one page to look at: results/report/index.html
	@$(BIN)/python -m scripts.report

check-results: $(READY) ## do notebooks, tables, PAPER.md, STUDIES.md, README.md and docs/ say what results/ says?
	@$(BIN)/python -m scripts.check_results

docs: $(READY) ## the documentation as a website: build/docs/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean && echo "build/docs/index.html"

docs-serve: $(READY) ## show the documentation while you write it: http://127.0.0.1:8000
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

package: $(READY) ## wheel and source distribution, checked: build/package
	@rm -rf build/package && $(BIN)/python -m hatchling build -d build/package >/dev/null && $(BIN)/twine check --strict build/package/*

clean: ## remove .venv and caches; results stay
	@rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build; find . -name __pycache__ -type d -prune -exec rm -rf {} +
