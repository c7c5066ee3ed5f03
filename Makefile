# Both commands make .venv when it is missing; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test faults gpu lint bench constraints load clean

demo: $(READY)
	$(BIN)/unmask demo

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 10

# All kills, write faults, corruptions, hostile folders, requests and ways to spread a run; `make test` runs a sample that
# is the same every time, see tests/matrix.py.
faults: $(READY)
	UNMASK_FAULTS=all UNMASK_FAULTS_REPORT=docs/faults-last.txt $(BIN)/python -m pytest -q tests/faults tests/hostile tests/parallel tests/server/test_schema.py tests/server/test_page.py tests/server/test_page_for_everybody.py tests/server/test_stops.py tests/test_generate_many.py tests/numerics/test_learning.py tests/numerics/test_drivers.py tests/test_ways.py

# What needs a GPU; without one it is said and nothing else runs.
gpu: $(READY)
	$(BIN)/python -m pytest -q -rs tests/gpu

lint: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

# 200 constrained draws of each pattern by each of three models; in `make test` it is 24 by one of them.
constraints: $(READY)
	UNMASK_DRAWS=200 $(BIN)/python -m pytest -q tests/test_constraints.py -k every_draw

bench: $(READY)
	$(BIN)/unmask bench train --device cpu --hidden 256 --blocks 4 --length 256 --vocab 32768 --batch 8 --dropout 0
	$(BIN)/unmask bench sample --device cpu --hidden 256 --blocks 4 --length 256 --vocab 32768 --batch 8 --steps 256 --calls 12

# A server under load for MINUTES, against what docs/serving.md promises.
MINUTES ?= 10
load: $(READY)
	$(BIN)/python benchmarks/load.py --minutes $(MINUTES)

# torch is named with its version first, so that pip settles on the build we test with.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "unmask needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV); on Debian: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
