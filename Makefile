# failsoft: the two commands of the README are `make rollout` and `make test`; both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINES := $(VENV)/engines/.installed
ROOMS := protocol faults dispatch chaos failsoft
RUN_OUT ?= out/rollout
PYTEST := $(BIN)/python -m pytest
QUICK := not soak and not vllm and not sglang
COMPUTING := tests/properties tests/typing tests/protocol tests/faults
POSTING := tests/dispatch/posting tests/chaos tests/matrix tests/ray_boundary tests/ray_table

.DEFAULT_GOAL := help
.PHONY: help rollout test test-vllm test-sglang lint bench soak docs matrix clean

help:
	@echo "make rollout  sample examples/prompts.jsonl while a poster and an engine are killed"
	@echo "make test     lint, types and all tests, the chaos tests included"
	@echo "make test-vllm, make test-sglang  the real engine on the CPU, killed part by part (3 GB, some minutes)"
	@echo "make lint     ruff, mypy --strict, basedpyright and the import direction"
	@echo "make bench    the cost of the error protocol; the pool beside a plain one, under kills, and at scale;"
	@echo "              engines killed, and started at once"
	@echo "make soak     the long random runs that make test leaves out"
	@echo "make docs     write docs/codes.md anew from the catalogue"
	@echo "make matrix   write docs/matrix.md anew: boundary by exception shape, on a real Ray;"
	@echo "              and docs/engine-matrix.md: who is killed, by which signal, in which state"
	@echo "make clean    remove the environments, caches and out/"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("failsoft needs Python 3.11 or later, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@# Apart: Ray gives every async actor a uvloop as soon as it can import one, and tests mean to choose.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade --target $(VENV)/uvloop uvloop
	@touch $@

# Real servers that tests start: llama.cpp's and sglang-router. Apart, since they bring packages of their own.
$(ENGINES): constraints.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --only-binary :all: --no-compile \
		--upgrade --target $(@D) sglang-router xllamacpp gguf
	@touch $@

rollout: $(STAMP)
	$(BIN)/failsoft rollout examples/prompts.jsonl --out $(RUN_OUT) --overwrite

# Three at once: one computes, the others wait for processes most of the time. Whatever starts engines is in
# one of them: a start ends what other engines have left on the machine, and some tests leave it on purpose.
test: lint $(ENGINES)
	@mkdir -p out
	@$(PYTEST) -m "$(QUICK)" -p no:cacheprovider $(COMPUTING) > out/computing.log 2>&1 & computing=$$!; \
	$(PYTEST) -m "$(QUICK)" -p no:cacheprovider $(POSTING) > out/posting.log 2>&1 & posting=$$!; \
	trap 'kill $$computing $$posting 2> /dev/null' EXIT; \
	$(PYTEST) -m "$(QUICK)" $(addprefix --ignore=,$(COMPUTING) $(POSTING)); failed=$$?; \
	wait $$computing || failed=1; wait $$posting || failed=1; trap - EXIT; \
	for part in computing posting; do echo; echo "== $$part"; cat out/$$part.log; done; \
	exit $$failed

test-vllm: $(STAMP) .venv-vllm/.installed
	$(PYTEST) tests/real_engines -m vllm --timeout 3600 -s

# In a network namespace with nothing but loopback: SGLang's scheduler listens on all interfaces. And with a
# temporary folder of its own: of those of earlier tests pytest would remove the oldest, which not all can be here.
test-sglang: $(STAMP) .venv-sglang/.installed
	@mkdir -p out
	unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' sh $(PYTEST) tests/real_engines -m sglang \
		--timeout 3600 --basetemp out/sglang -s

.venv-vllm/.installed: tests/real_engines/vllm-requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $<
	$(@D)/bin/python tests/real_engines/vllm_alias.py
	@touch $@

.venv-sglang/.installed: tests/real_engines/sglang-requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.error_protocol
	$(BIN)/python -m benchmarks.pool
	$(BIN)/python -m benchmarks.goodput
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.engines

soak: $(STAMP)
	$(PYTEST) -m soak --timeout 3600 -s

docs: $(STAMP)
	$(BIN)/failsoft codes --markdown > docs/codes.md.new
	mv docs/codes.md.new docs/codes.md

matrix: $(STAMP)
	$(BIN)/python -m tests.matrix > docs/matrix.md.new
	mv docs/matrix.md.new docs/matrix.md
	$(BIN)/python -m tests.engine_matrix > docs/engine-matrix.md.new
	mv docs/engine-matrix.md.new docs/engine-matrix.md

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang build out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
