# Everything you do with this project. Each target sets up the environment first, which is quick the second time.

PYTHON ?= python3
VENV ?= .venv
# Passed on to the demo, to pytest or to JupyterLab, as in: make test ARGS="tests/core/test_scheduler.py"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lab notebooks exercises book release check-release test-minimum lint check-vllm-links gpu-check cpu-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Another Python: make demo PYTHON=python3.12   One test file: make test ARGS=\"tests/core/test_scheduler.py\""

setup: ## Make the virtual environment: pinned packages and the default model
	@command -v "$(PYTHON)" >/dev/null || { echo "There is no command '$(PYTHON)' here: install Python 3.10 or newer, or name the one you have, for example \`make demo PYTHON=python3.12\`."; exit 1; }
	@"$(PYTHON)" tools/setup_env.py --venv "$(VENV)"

demo: setup ## Serve a few requests with the default model and show what the engine does
	@"$(VENV)/bin/minivllm" demo $(ARGS)

# Two processes, each with whole files, in the order of tests/conftest.py. Idle threads must sleep, or each process would slow the other down.
# A test that hangs fails after 15 minutes, with what each thread was doing.
# ARGS=--long adds the long tests, as .ci/run does; ARGS='-m "not slow"' leaves out the slow ones; ARGS="-n 0 --pdb" runs them in one process, with a debugger.
test: setup ## Run the tests, and the notebooks of the first lessons; all with ARGS=--long
	OMP_WAIT_POLICY=PASSIVE "$(VENV)/bin/python" -m pytest --nbval -n 2 --dist loadfile --no-loadscope-reorder --timeout 900 $(ARGS)

# With the settings in tools/jupyterlab, a link to the glossary opens the rendered page at its term.
lab: setup ## Open the course in JupyterLab, on lesson 00
	"$(VENV)/bin/python" -m jupyterlab --LabApp.app_settings_dir="$(CURDIR)/tools/jupyterlab" --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

notebooks: setup ## Run all notebooks and solutions again and store what they show
	"$(VENV)/bin/python" -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False $(wildcard notebooks/*.ipynb solutions/*.ipynb)
	"$(VENV)/bin/python" -m minivllm.course.pictures $(wildcard notebooks/*.ipynb solutions/*.ipynb)

exercises: setup ## Renew the cells that all notebooks share, and make the exercises from the solutions
	"$(VENV)/bin/python" -m minivllm.course.first_cells
	"$(VENV)/bin/python" -m minivllm.course.last_cell
	"$(VENV)/bin/python" -m minivllm.course.exercises $(ARGS)

book: setup ## Make a website of the course, in out/book/html (Python 3.11 or newer)
	@"$(VENV)/bin/python" -c "import furo, myst_nb" 2>/dev/null || "$(VENV)/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt furo myst-nb sphinx
	@"$(VENV)/bin/python" book/build.py $(ARGS)

release: book ## Build a release, wheel and sdist, in dist/
	@"$(VENV)/bin/python" -c "import build" 2>/dev/null || "$(VENV)/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt build
	@"$(VENV)/bin/python" tools/release.py $(ARGS)

# Packages in KEEP stay at their pinned versions, such as a torch without CUDA: make check-release KEEP=torch
check-release: release ## Install the release in an empty environment, with the newest packages, and use it
	@"$(VENV)/bin/python" tools/check_release.py --keep $(KEEP)

# Packages in KEEP stay at their pinned versions, where the oldest cannot be had: make test-minimum KEEP="torch triton"
test-minimum: ## Run the tests with the oldest versions that pyproject.toml allows, in an environment of their own
	@"$(PYTHON)" tools/setup_env.py --venv "$(VENV)-minimum" --minimum --keep $(KEEP)
	OMP_WAIT_POLICY=PASSIVE "$(VENV)-minimum/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout 900 tests $(ARGS)

lint: setup ## Check style, form and types of the code
	"$(VENV)/bin/python" -m ruff check minivllm tests benchmarks tools book
	"$(VENV)/bin/python" -m ruff format --check minivllm tests benchmarks tools book
	"$(VENV)/bin/python" -m mypy

# make check-vllm-links VLLM=path/to/vllm-0.32.0.whl
check-vllm-links: ## Check what lessons and docs say about vLLM's source: VLLM=a source folder or a wheel of it
	@"$(PYTHON)" tools/check_vllm_links.py $(or $(VLLM),$(error Name a source folder or a wheel of vLLM: make check-vllm-links VLLM=FOLDER))

gpu-check: ## On a machine with a GPU: kernels compiled, engine, CUDA graphs, benchmark; installs nothing
	@"$(PYTHON)" tools/gpu_check.py $(ARGS)

cpu-check: setup ## Test the CPU kernels and take the main measurements of this machine, in an hour or two; stores them in benchmarks/results
	@"$(VENV)/bin/python" tools/cpu_check.py $(ARGS)

clean: ## Remove the virtual environment
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; else echo "There is no virtual environment in $(VENV)."; fi
