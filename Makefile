SHELL := bash
unexport CDPATH # else cd prints where it goes
PYTHON ?= python3
# Half as many again as there are CPUs: tests often wait, for processes that start or a limit.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
.PHONY: help demo test test-all test-slow test-gpu lint bench pages rehearse venv venv-tensorflow

help: # this list
	@grep '^[a-z-]*:.*#' Makefile | sed 's/:.*# /\t/' | expand -t 18

demo: venv # exercise 8 on one GPU and on two; with fewer GPUs on CPU cores, too
	@bash demo.sh

test: lint # each script as users run it, and what DDP promises
	.venv/bin/python -m pytest -n $(WORKERS)

test-all: test test-slow # also what is slow; TensorFlow; with root a real Slurm

test-slow: venv venv-tensorflow
	.venv/bin/python -m pytest -m 'cluster or slow' -n $(WORKERS)
	.venv-tensorflow/bin/python -m pytest --override-ini addopts= tests/test_tensorflow.py

lint: venv # style
	.venv/bin/ruff check && .venv/bin/ruff format --check

bench: venv # speeds, against ceilings and naive versions
	@source common/env.sh && cd bench && "$${PYTHON[@]}" bench.py $(BENCH)

test-gpu: # all that wants a GPU, in ten minutes, and one file to send in
	@source common/env.sh && cd bench && "$${PYTHON[@]}" test_gpu.py $(GPU)

rehearse: # what a lesson takes: make rehearse LESSON=exercise8 REHEARSE="--small --students 20"
	@$(PYTHON) bench/rehearse.py "$(LESSON)" $(REHEARSE)

pages: venv # a page for each pair, to read and to project, in build/pages
	.venv/bin/python docs/pages/build.py

venv: .venv/installed # PyTorch and the other packages, in .venv; TORCH=cu126 in front: for older GPUs

# Once more if another PyTorch is asked for than the one that is there.
ifneq ($(TORCH),$(if $(TORCH),$(shell cat .venv/installed 2> /dev/null)))
.PHONY: .venv/installed
endif
.venv/installed: requirements.txt cinic_lab/requirements.txt docs/pages/requirements.txt
	@bash install.sh $(PYTHON) $^

venv-tensorflow: .venv-tensorflow/installed # TensorFlow, in .venv-tensorflow

.venv-tensorflow/installed: dp_ddp_intro/tensorflow/requirements.txt
	@echo "Installing TensorFlow in .venv-tensorflow: some GB, usually a few minutes"
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@
