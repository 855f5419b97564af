# make demo    compare five optimisers on handwritten digits; installs only what this needs
# make test    lint, types, the tests
# make test-all  also the long tests, the coverage of the algorithms and a real federation: what CI runs
# make test-federation  a real SuperLink and SuperNodes as processes: minutes, because Flower waits
# make test-federation-long  the one it leaves out: the clock's seconds on links of the nodes' own
# make docs    the documentation as a site, docs/_build/html/index.html (make test checks it without writing HTML)
# make papers  only the checks of every algorithm against its paper, one line each
# make dist    wheel and source archive, in dist/
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Without cached bytecode, each of the many processes that tests start compiles torch again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test docs papers dist clean

demo: $(VENV)/.demo
	$(BIN)/lamina demo

test: lint
	$(PYTEST)

.PHONY: lint
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every line of the algorithms must be tested. Measuring it makes tests a third slower, so only theirs are measured,
# without the two files that take longest and reach no line that the others do not.
LONGEST := $(addprefix tests/algorithms/test_,pseudo_code.py independence.py)
MEASURED := $(filter-out $(LONGEST),$(wildcard tests/algorithms/test_*.py))
ALL := -m "long or not long"
.PHONY: test-all all-but-federation federation-beside
test-all: lint
	$(MAKE) -j 2 federation-beside all-but-federation

# It gives way to the federation: Flower starts an app again that is not ready after 30 s, and again.
all-but-federation: $(VENV)/.installed
	nice $(PYTEST) $(ALL) $(addprefix --ignore=,$(MEASURED))
	nice $(PYTEST) $(ALL) $(MEASURED) --cov=src/lamina/algorithms --cov-fail-under=100 --cov-report=term-missing:skip-covered

# Its output is shown in one piece when it is over, because the other tests write theirs meanwhile.
federation-beside: $(VENV)/.installed
	@$(MAKE) test-federation > .federation.log 2>&1; code=$$?; cat .federation.log; exit $$code

# Files run side by side, because these tests wait more than they compute.
.PHONY: test-federation
test-federation: $(VENV)/.installed
	$(BIN)/pytest -vv -n 2 --dist loadfile --durations=0 tests/federation

# It takes minutes, and the time of CI is limited.
.PHONY: test-federation-long
test-federation-long: $(VENV)/.installed
	$(BIN)/pytest -vv -m long tests/federation

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

papers: $(VENV)/.installed
	$(BIN)/pytest -v $(addprefix tests/algorithms/test_,pseudo_code.py reductions.py invariants.py newer_identities.py newer_adamw.py)

dist: $(VENV)/.installed
	$(BIN)/python -m build

# lamina, its peers and a plain PyTorch loop in one table; BENCH holds options, such as BENCH="W2 --rounds 10"
.PHONY: bench
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py $(BENCH)

# torch is pinned by constraints.txt; the package itself accepts a range. Python compiles only what is imported.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lamina needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[report]'
	@touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist docs/_build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
