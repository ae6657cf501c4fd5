# make demo   the main job on a real model, in a fresh environment
# make test   the whole suite; FULL=1 every case of its longest tables, of which each commit runs a part in turn
# make check  format, lint, types
# make mutations  proof that the tests bite: faults put in one by one; ONLY="'lr dropped'" only that one,
#                 ONLY="--package aprfmt" those of one package
# make docs   the manual, in site/ (to look: python3 -m http.server -d site); a warning is an error
# make dist   wheel and source archive, in dist/
# make release  the same twice with equal bytes, bill of materials, checksums, signature, checklist; KEY=release.key,
#               PASSPHRASE_FILE=...
# make fuzz   damaged files against every reader and writer; MINUTES=120 JOBS=8
# make kills  300 writers killed at any moment: what each leaves, and what the next run makes of it; KILLS=1000
# make conformance  every architecture against transformers and llama.cpp, writes docs/architectures.md;
#                   ROWS="arcee qwen2" runs only those, and keeps what the others came to
# make conformance-fuzz  random configurations of every architecture, both ways, in conformance-fuzz-output/;
#                   MINUTES=60, CASES=5000, SEED=1, ROWS, JOBS; DOCS=1 keeps the counts for docs/architectures.md;
#                   PLAIN=1 those that llama.cpp does not run: there and back by an .apr, and a GGUF refused
# make bench  ratios against peers and floors, see docs/performance.md; FULL=1 at the sizes of that page

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check docs dist release mutations fuzz kills conformance conformance-fuzz bench clean

demo: $(VENV)/.demo
	@$(BIN)/python tools/fetch_material.py smollm2 || echo "no network: the demo takes its small bundled model" >&2
	@mkdir -p demo-output
	@for model in $${APR_MATERIAL:-$$HOME/.cache/aprfmt/material}/smollm2/*.gguf; do \
		if [ -f "$$model" ]; then cp "$$model" demo-output/; fi; done
	@APR_DEMO_MODEL="$$(ls demo-output/SmolLM2*[0-9].gguf 2>/dev/null | head -n 1)" $(BIN)/apr demo -o demo-output
	@echo 'next: . $(VENV)/bin/activate && cd demo-output' >&2

test: $(VENV)/.test
	@$(BIN)/python tools/fetch_material.py || echo "no network: tests that need real material are skipped" >&2
	@FULL=$(FULL) tools/test.sh $(BIN)/python

check: $(VENV)/.check
	$(BIN)/ruff format --check src tests tools
	$(BIN)/ruff check src tests tools
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(VENV)/.dist
	$(BIN)/python -m build --outdir dist

release: $(VENV)/.dist
	$(BIN)/python tools/release.py $(KEY:%=--key %) $(PASSPHRASE_FILE:%=--passphrase-file %)

mutations: $(VENV)/.test
	$(BIN)/python tools/mutate.py $(ONLY)

fuzz: $(VENV)/.test
	$(BIN)/python tools/fuzz.py --minutes $(or $(MINUTES),60) --jobs $(or $(JOBS),2) --seed $(or $(SEED),$$$$) --out fuzz-output

kills: $(VENV)/.test
	$(BIN)/python tools/kill_writers.py $(if $(KILLS),--kills $(KILLS))

conformance: $(VENV)/.test
	@$(BIN)/python tools/fetch_material.py
	$(BIN)/python tools/conformance.py $(ROWS:%=--row %) --docs

conformance-fuzz: $(VENV)/.test
	CUDA_VISIBLE_DEVICES="" $(BIN)/python tools/configs.py --fuzz $(MINUTES:%=--minutes %) $(CASES:%=--cases %) \
		$(SEED:%=--seed %) $(JOBS:%=--jobs %) $(ROWS:%=--row %) $(if $(PLAIN),--plain) $(if $(DOCS),--docs) --out conformance-fuzz-output

bench: $(VENV)/.test
	@$(BIN)/python tools/fetch_material.py
	$(BIN)/python tools/bench_open.py
	$(BIN)/python tools/bench_codec.py $(if $(FULL),--full)
	$(BIN)/python tools/bench_write.py
	$(BIN)/python tools/bench_convert.py $(if $(FULL),--full)
	$(BIN)/python tools/bench_verify.py
	$(BIN)/python tools/bench_quantize.py $(if $(FULL),--full)
	$(BIN)/python tools/bench_mlx.py
	$(BIN)/python tools/bench_hub.py $(if $(FULL),,--layers 4 --rate 0)
	$(BIN)/python tools/bench_merge.py $(if $(FULL),,--layers 4)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[fast,llama]"
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	tools/prepare_tests.sh $(BIN)/python
	@touch $@

$(VENV)/.docs: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	@touch $@

$(VENV)/.dist: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet build -e ".[sign]"
	@touch $@

$(VENV)/.check: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) dist site demo-output fuzz-output conformance-fuzz-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
