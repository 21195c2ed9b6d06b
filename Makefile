PYTHON ?= python3
BIN := .venv/bin
QUICK := $(addprefix tests/, records storing learning nets acting algorithms/test_dqn.py algorithms/test_vtrace.py \
	envs/test_envs.py test_architecture.py test_bounds.py test_metrics.py test_mutants.py test_program.py)

.PHONY: help venv demo test test-quick test-long test-mutants chaos lint bench clean

help:
	@echo "make demo          train CartPole with Ape-X and the live table, evaluate it, draw its curve, record a video"
	@echo "make test          lint and all tests (10 to 17 minutes on two cores)"
	@echo "make test-quick    lint and the tests that start no run: the data path, stores, losses, networks (under 2 minutes)"
	@echo "make test-long     the soaks and sweeps too"
	@echo "make chaos         random faults against a run that learns: make chaos RECIPE=impala MINUTES=2 SEED=7 FLAGS='--transport grpc'"
	@echo "make test-mutants  put known bugs of replay back, one at a time, and show the tests that catch them"
	@echo "make bench         measure this machine against its limits, Stable-Baselines3, cpprb and multiprocessing"

# Idempotent: installs when pyproject.toml or constraints.txt changed, and does nothing otherwise.
venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	rm -rf runs/demo
	$(BIN)/veldt train apex-dqn --env CartPole-v1 --run runs/demo
	$(BIN)/veldt eval runs/demo --episodes 20 --video runs/demo/episode.gif
	$(BIN)/veldt plot runs/demo -o runs/demo/curve.png
	@echo "Look at runs/demo/curve.png and runs/demo/episode.gif; all numbers: $(BIN)/tensorboard --logdir runs"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist loadfile

test-quick: lint
	$(BIN)/pytest -n 2 $(QUICK)

test-long: lint
	VELDT_EXAMPLES=20 $(BIN)/pytest -m 'long or not long'

RECIPE ?= apex-dqn
MINUTES ?= 2

chaos: venv
	$(BIN)/python tests/chaos_schedule.py --recipe $(RECIPE) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
		$(if $(SCORE),--score $(SCORE)) $(if $(FLAGS),-- $(FLAGS))

test-mutants: venv
	$(BIN)/python tests/mutants.py

bench: venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/veldt bench learner
	$(BIN)/veldt bench dqn
	$(BIN)/veldt bench replay
	$(BIN)/veldt bench transport
	$(BIN)/veldt bench scaling
	$(BIN)/veldt bench apex --sb3-python $(BIN)/python

clean:
	rm -rf .venv runs sweeps populations studies .pytest_cache .mypy_cache .ruff_cache .hypothesis
