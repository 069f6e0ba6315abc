# Every command sets itself up: the virtual environment .venv is made when it is missing, and the
# compiled parts are built again when their sources have changed.

PYTHON ?= python3
BIN    := .venv/bin
CORE   := setup.py pyproject.toml $(wildcard kernels/*.pyx kernels/*.pxd kernels/*.h)

.PHONY: all bench test lint wheel clean

all: .venv/core

bench: .venv/core          ## the main job; ARGS="--num_devices=4" adds flags
	$(BIN)/python -m minidist.bench $(ARGS)

test: .venv/test           ## every test that needs no GPU; ARGS="-k replica" adds options
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/lint           ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint kernels
	rm -rf build/types && mkdir -p build/types
	cp -rs $(CURDIR)/minidist build/types/minidist
	ln -s $(CURDIR)/kernels build/types/minidist/kernels
	$(BIN)/mypy build/types/minidist

wheel: .venv/core          ## dist/*.whl
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv build dist *.egg-info kernels/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python $(CORE)
	@echo "building the compiled parts; this takes about half a minute"
	$(BIN)/pip install --quiet --editable .
	@touch $@

.venv/test: .venv/core
	$(BIN)/pip install --quiet --editable ".[test]"
	@touch $@

.venv/lint: .venv/core
	$(BIN)/pip install --quiet --editable ".[lint]"
	@touch $@
