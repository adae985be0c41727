# On a machine with Python and pip, `make demo` translates, `make test` checks everything and `make docs` builds the
# documentation; all create .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo lint test test-fast test-distributed test-browser test-ray docs clean

# The packages that translation needs; `make install` adds the others.
$(VENV)/.translates: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch -c constraints.txt
	$(BIN)/pip install --quiet -e . -c constraints.txt
	touch $@

$(VENV)/.installed: $(VENV)/.translates
	$(BIN)/pip install --quiet -e ".[track,test]" -c constraints.txt
	touch $@

install: $(VENV)/.installed

demo: $(VENV)/.translates
	@echo "All tokens of a sentence are predicted in parallel. A line is printed for every evaluation that changes the draft, until it converges."
	@echo
	@$(BIN)/hf-deqnar translate --watch "Where is the train station?" "I would like a cup of coffee." \
		"Could you tell me where the bathroom is?" "My sister has two children and a dog."

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --ignore tests/ray -m "not distributed"

test-fast: install
	$(BIN)/python -m pytest -n 2 --ignore tests/ray -m "not slow and not distributed"

# Training in several processes and on two machines (network namespaces, which need root); takes minutes.
test-distributed: install
	$(BIN)/python -m pytest --ignore tests/ray -m distributed

# The page of `hf-deqnar demo` in Chromium, which is installed from Debian's packages if it is missing.
test-browser: $(VENV)/.browser
	command -v chromium > /dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)
	$(BIN)/python -m pytest tests/browser

$(VENV)/.browser: $(VENV)/.installed
	$(BIN)/pip install --quiet -e ".[demo,browser]" -c constraints.txt
	touch $@

# The pages are in docs/; docs/results.md is printed from the result files of experiments/.
docs: $(VENV)/.documents
	$(BIN)/python experiments/results_page.py > docs/results.md.new && mv docs/results.md.new docs/results.md
	$(BIN)/mkdocs build --strict

# `hf-deqnar distill --ray` on a cluster of this machine.
test-ray: install
	$(BIN)/pip install --quiet -e ".[ray]" -c constraints.txt
	$(BIN)/python -m pytest tests/ray

$(VENV)/.documents: $(VENV)/.translates
	$(BIN)/pip install --quiet -e ".[docs,train]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build site src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
