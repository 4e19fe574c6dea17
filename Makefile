# make train: everything from nothing to a trained GPT, its noise scale and a picture.
# make check: linter, types and the tests that are quick, in two minutes.  make test: linter, types and all tests.
# make requirements: do the pinned packages install on a stock Linux machine?  make attack: the long attack, a thousand cases.
# make gpu: whether all works on this machine's GPU, and how fast.
PYTHON ?= python3
BIN = .venv/bin
PYTEST = $(BIN)/python -m pytest -q -n 2 --dist worksteal

.PHONY: train check lint test requirements attack gpu clean

train: .venv/ready
	$(BIN)/python train.py --resume=auto

check: lint
	$(PYTEST) -m "not slow" tests

test: lint
	$(PYTEST) tests

lint: .venv/ready-test
	$(BIN)/python -m ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

requirements: .venv/ready-test
	RIGHTBATCH_RESOLVE=1 $(BIN)/python -m pytest -q -k "requirement or pinned" tests/test_package.py

attack: .venv/ready-test
	$(BIN)/python tests/attack/attack.py --cases=1000 --soak=10000
	ATTACK_EXAMPLES=500 $(BIN)/python -m pytest -q tests/attack/test_inputs.py

gpu: .venv/ready
	$(BIN)/python bench.py gpu

.venv/ready: requirements.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/ready-test: requirements-test.txt .venv/ready
	$(BIN)/python -m pip install --quiet -r requirements-test.txt
	touch $@

clean:
	rm -rf .venv
