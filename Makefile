# Each target sets itself up: the first one builds .venv, later ones reuse it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: bench demo docs examples experiments figures notebooks package test test-all test-arithmetic test-python lint format clean

# What is imported is compiled then: all of torch takes a minute.
PIP_INSTALL := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

.venv/.bench: .venv/.installed
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

.venv/.docs: .venv/.installed
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

# Material for MkDocs announces its successor at every build.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html, or, for the search too: $(BIN)/mkdocs serve"

# The notebooks of docs/tutorials, run anew from examples/tutorials: a minute and a half.
notebooks: .venv/.docs
	OMP_NUM_THREADS=1 $(BIN)/python website/notebooks.py

# The figures of the pages that explain the ideas, in docs/images: half a minute.
figures: .venv/.docs
	OMP_NUM_THREADS=1 $(BIN)/python website/concept_figures.py

bench: .venv/.bench
	$(BIN)/python -m benchmarks

demo: .venv/.installed
	$(BIN)/python examples/demo.py

ON_A_FOLDER := examples/train_timm_on_a_folder.py
examples: .venv/.installed
	for example in $(filter-out $(ON_A_FOLDER) examples/demo.py,$(wildcard examples/*.py)); do echo "== $$example"; $(BIN)/python $$example || exit 1; done
	$(BIN)/python $(ON_A_FOLDER) --make-data

# The paper's experiments, reduced: those on the digits; with LAPLACE_DEBIAS_DATA (CIFAR-10) those on
# small networks trained first; with LAPLACE_DEBIAS_CHECKPOINT too those on a trained All-CNN-C.
# `OMP_NUM_THREADS=1 make -j2 experiments` makes
# two at a time, and `make experiment-NAME` one.
CONFIGS := $(wildcard configs/paper/*.yaml)
ON_CHECKPOINT := $(shell grep -l '^problem: allcnnc-cifar10' $(CONFIGS))
ON_CIFAR := $(filter-out $(ON_CHECKPOINT),$(shell grep -l '^problem: .*cifar' $(CONFIGS)))
ON_DIGITS := $(filter-out $(ON_CHECKPOINT) $(ON_CIFAR),$(CONFIGS))
HAS_CIFAR := $(LAPLACE_DEBIAS_DATA)
HAS_CHECKPOINT := $(and $(LAPLACE_DEBIAS_DATA),$(LAPLACE_DEBIAS_CHECKPOINT))
CHOSEN := $(ON_DIGITS) $(if $(HAS_CIFAR),$(ON_CIFAR)) $(if $(HAS_CHECKPOINT),$(ON_CHECKPOINT))
stems = $(basename $(notdir $1))
targets = $(patsubst configs/paper/%.yaml,experiment-%,$1)
# Configs are called after their experiment, but for these.
NAME_comparison := laplace
NAME_directional_curvature_digits := directional_curvature
NAME_wide_resnet := directional_curvature
NAME_overlaps_digits := overlaps
NAME_laplace_digits := laplace
NAME_laplace_resnet_cifar10 := laplace
NAME_laplace_vit_cifar10 := laplace

.PHONY: $(call targets,$(CONFIGS))
experiments: $(call targets,$(CHOSEN))
	@echo "Made: $(patsubst experiment-%,%,$^)"
	@$(if $(HAS_CIFAR),,echo "Skipped, set LAPLACE_DEBIAS_DATA to run them: $(call stems,$(ON_CIFAR))")
	@$(if $(HAS_CHECKPOINT),,echo "Skipped, set $(if $(HAS_CIFAR),,LAPLACE_DEBIAS_DATA and )\
	LAPLACE_DEBIAS_CHECKPOINT to run them: $(call stems,$(ON_CHECKPOINT))")

$(call targets,$(ON_CIFAR) $(ON_CHECKPOINT)): SOURCE = --data=$(LAPLACE_DEBIAS_DATA)
$(call targets,$(ON_CHECKPOINT)): SOURCE += --checkpoint=$(LAPLACE_DEBIAS_CHECKPOINT)
ifneq ($(filter experiments,$(MAKECMDGOALS)),)  # it takes times, so it comes last
experiment-runtime: | $(filter-out experiment-runtime,$(call targets,$(CHOSEN)))
endif
$(call targets,$(CONFIGS)): experiment-%: .venv/.installed
	$(BIN)/python -m examples.paper $(or $(NAME_$*),$*) --config configs/paper/$*.yaml $(SOURCE)

# `make test` leaves out what is marked slow. CI and `make test-all` run everything, with the shapes
# and types of every call checked in one case of each test that is not slow (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
CHECKED := "--jaxtyping-packages=laplace_debias,beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

test: .venv/.installed
	$(PYTEST) -m "not slow"

test-all: .venv/.installed
	$(PYTEST) -m "not slow" $(CHECKED)
	$(PYTEST) -m slow

# The tests of `make test` under other arithmetic, a setting after the other: 30 minutes on two cores.
# Instruction sets, threads, and a LAPACK of which one decomposition in ten fails.
ARITHMETIC := OMP_NUM_THREADS=2,PYTEST_XDIST_AUTO_NUM_WORKERS=1 MKL_CBWR=COMPATIBLE \
	ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_ENABLE_INSTRUCTIONS=AVX2 \
	LAPLACE_DEBIAS_FAULTY_EIGH=nan LAPLACE_DEBIAS_FAULTY_EIGH=raise
test-arithmetic: .venv/.installed
	for setting in $(ARITHMETIC); do echo "== $$setting"; \
	env $$(echo $$setting | tr , ' ') $(PYTEST) -m "not slow" || failed="$$failed $$setting"; \
	done; test -z "$$failed" || { echo "Failed:$$failed"; exit 1; }

# The same with another Python, in an environment that is removed again (6 GB, minutes to install):
# `make test-python PYTHON=python3.13`; with LOWEST=1 the lowest versions that are allowed.
test-python:
	folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; python=$$folder/bin/python; \
	$(PYTHON) -m venv $$folder && $$python -m pip install -q uv && \
	if [ -n "$(LOWEST)" ]; \
	then $$python -m uv pip install -q --python $$python --resolution lowest-direct -e '.[dev]'; \
	else $$python -m pip install -q -e '.[dev]'; fi && \
	OMP_NUM_THREADS=1 $$python -m pytest -n auto --dist worksteal -m "not slow"

# The package as it is uploaded to PyPI, in dist/. The command of the installed wheel prints its version.
package:
	rm -rf dist
	folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; python=$$folder/bin/python; \
	$(PYTHON) -m venv $$folder && $$python -m pip install -q --disable-pip-version-check build twine && \
	$$python -m build && $$python -m twine check --strict dist/* && \
	$$python -m pip install -q --disable-pip-version-check --no-deps dist/*.whl && \
	cd $$folder && $$folder/bin/laplace-debias --version

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python website/word_rules.py

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv results site build dist *.egg-info
