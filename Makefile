# On a machine with Python and pip, `make demo` translates and `make test` checks everything; both create .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo lint test clean

# What translating needs; the rest takes longer and is added by `make install`.
$(VENV)/.translates: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch -c constraints.txt
	$(BIN)/pip install --quiet -e . -c constraints.txt
	touch $@

$(VENV)/.installed: $(VENV)/.translates
	$(BIN)/pip install --quiet -e ".[train,track,plot,ctranslate2,onnx,test]" -c constraints.txt
	touch $@

install: $(VENV)/.installed

demo: $(VENV)/.translates
	@echo "Each sentence is written at once, and then settles: a line for every evaluation that changes it."
	@echo
	@$(BIN)/hf-deqnar translate --watch "Where is the train station?" "I would like a cup of coffee." \
		"My brother has lived in Berlin for three years." "The weather is nice today, so we are going to the park."

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .ruff_cache
