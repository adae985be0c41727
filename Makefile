# `make test` on a machine with Python and pip is all it takes: it creates .venv, installs, and checks everything.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install lint test clean

$(VENV)/.installed: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch -c constraints.txt
	$(BIN)/pip install --quiet -e ".[train,track,plot,ctranslate2,onnx,test]" -c constraints.txt
	touch $@

install: $(VENV)/.installed

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .ruff_cache
