SHELL := bash
unexport CDPATH # else cd prints where it goes
PYTHON ?= python3
# More workers than CPUs, since tests often wait.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
.PHONY: help demo test test-all test-slow test-weekly test-tensorflow test-checkup test-gpu lint \
	bench pages rehearse venv venv-tensorflow venv-frameworks

help: # print this list
	@grep '^[a-z-]*:.*#' Makefile | sed 's/:.*# /\t/' | expand -t 18

demo: venv # exercise 8 on one GPU and on two (CPU cores stand in for missing GPUs)
	@bash demo.sh

test: lint # run each script as users do, and compare DDP with one process
	.venv/bin/python -m pytest -n $(WORKERS)

test-all: test test-slow test-tensorflow test-weekly test-checkup # plus slow tests and, as root, a real Slurm

test-slow: venv
	.venv/bin/python -m pytest -m 'cluster or slow' -n $(WORKERS)

test-tensorflow: venv-tensorflow
	.venv-tensorflow/bin/python -m pytest --override-ini addopts= tests/test_tensorflow.py

test-weekly: venv venv-tensorflow # type every page's commands, as a reader does
	.venv/bin/python -m pytest -m weekly -n $(WORKERS) --dist worksteal

test-checkup: venv venv-frameworks # test the checkup by itself
	$(MAKE) -C checkup test-all PYTHON=../.venv/bin/python

lint: venv # check the style
	.venv/bin/ruff check && .venv/bin/ruff format --check

bench: venv # measure speeds against ceilings and naive versions
	@source common/env.sh && cd bench && "$${PYTHON[@]}" bench.py $(BENCH)

test-gpu: # check everything that needs a GPU, on one or more; writes files to send
	@bash tests/gpu/run.sh $(GPU)

rehearse: # time a lesson: make rehearse LESSON=exercise8 REHEARSE="--students 20"
	@$(PYTHON) tools/rehearse.py "$(LESSON)" $(REHEARSE)

pages: venv # build the site in build/pages: READMEs, answers, pairs line by line
	.venv/bin/sphinx-build -q -E -W -j auto -d build/doctrees -c docs/site . build/pages
	@echo "Open build/pages/index.html"

venv: .venv/installed # install PyTorch and the other packages in .venv (older GPUs: TORCH=cu126 make venv)

# Install again if TORCH asks for another PyTorch than the installed one.
ifneq ($(TORCH),$(if $(TORCH),$(shell cat .venv/installed 2> /dev/null)))
.PHONY: .venv/installed
endif
.venv/installed: requirements.txt cinic_lab/requirements.txt docs/site/requirements.txt
	@bash install.sh $(PYTHON) $^

venv-tensorflow: .venv-tensorflow/installed # install TensorFlow in .venv-tensorflow

.venv-tensorflow/installed: dp_ddp_intro/tensorflow_scripts/requirements.txt
	@echo "Installing TensorFlow in .venv-tensorflow: some GB, usually a few minutes"
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

venv-frameworks: .venv-frameworks/installed # install Lightning, Accelerate and Transformers beside .venv

# This environment uses the PyTorch of .venv.
.venv-frameworks/installed: checkup/tests/programs/frameworks/requirements.txt .venv/installed
	$(PYTHON) -m venv .venv-frameworks
	ls -d $(CURDIR)/.venv/lib/python*/site-packages > pytorch.pth
	mv pytorch.pth .venv-frameworks/lib/python*/site-packages/
	.venv-frameworks/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@
