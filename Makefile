# Every command sets itself up: the virtual environment .venv is made when it is missing, and the
# compiled parts are built again when their sources have changed.

PYTHON ?= python3
BIN    := .venv/bin
CORE   := setup.py pyproject.toml $(wildcard kernels/*.pyx kernels/*.pxd kernels/*.h kernels/*.cpp)

SANITIZE := -fsanitize=thread -g

.PHONY: all bench test test-all test-gpu tsan lint wheel clean

all: .venv/core

bench: .venv/core          ## the main job; ARGS="--num_devices=4" adds flags
	$(BIN)/python -m minidist.bench $(ARGS)

test: .venv/test           ## every test that needs no GPU; ARGS="-k replica" adds options
	$(BIN)/python -m pytest $(ARGS)

test-all: .venv/test       ## the same with every combination of workers, devices and ps; half an hour
	MINIDIST_TEST_ALL=1 $(BIN)/python -m pytest $(ARGS)

test-gpu: .venv/test-gpu   ## what can be proved of the GPU's part without one; three minutes
	$(BIN)/python -m pytest tests/gpu $(ARGS)

tsan: .venv/test           ## the compiled core under GCC's thread sanitizer; five minutes
	rm -rf build/tsan && mkdir -p build/tsan
	cp -r kernels minidist setup.py pyproject.toml README.md LICENSE build/tsan
	rm -f build/tsan/kernels/*.so
	cd build/tsan && CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" \
		$(abspath $(BIN))/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m zipfile -e build/tsan/dist/*.whl build/tsan/lib
	TSAN_OPTIONS="log_path=$(CURDIR)/build/tsan/report" LD_PRELOAD=$$(g++ -print-file-name=libtsan.so) \
		PYTHONSAFEPATH=1 PYTHONPATH=build/tsan/lib OPENBLAS_NUM_THREADS=1 setarch -R \
		$(BIN)/python -m pytest --timeout 600 -k "not fork" tests/test_rendezvous.py \
		$(wildcard tests/test_kernels_*.py) $(ARGS)
	! cat build/tsan/report.* 2> /dev/null

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

.venv/test-gpu: .venv/test
	$(BIN)/pip install --quiet --editable ".[test,test-gpu]"
	@touch $@

.venv/lint: .venv/core
	$(BIN)/pip install --quiet --editable ".[lint]"
	@touch $@
