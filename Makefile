SHELL := /bin/bash
PYTHON ?= python3
# Half as many again as there are CPUs: much of what is slow waits, for Slurm or a time limit.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
QUIET = $$([ -t 2 ] || echo --quiet) # on a terminal pip shows bars
DEMO := --backbone tinyvgg --epochs 10 --finetune-epochs 2
.PHONY: help demo test test-all lint bench pages rehearse venv venv-tensorflow

help: # this list
	@grep '^[a-z-]*:.*#' Makefile | sed 's/:.*# /\t/' | expand -t 18

demo: venv # exercise 8 on one GPU and on two, or on CPU cores that play them
	@source common/env.sh && cd exercise8 && "$${PYTHON[@]}" sample_data.py && echo && \
	gpus 2 && export DATADIR=../data/sample && \
	bash run.sh pytorch_dvc_cnn_pretrained.py $(DEMO) && echo && \
	bash run-2gpus.sh pytorch_dvc_cnn_pretrained_multigpu.py $(DEMO) && \
	tail -n 2 logs/results.jsonl | "$${PYTHON[@]}" ../bench/compare.py /dev/stdin

test: lint # each script as users run it, and what DDP promises
	.venv/bin/python -m pytest

test-all: lint venv-tensorflow # the same and what is slow; TensorFlow; with root a real Slurm
	.venv/bin/python -m pytest -m '' -n $(WORKERS)
	.venv-tensorflow/bin/python -m pytest --override-ini addopts= tests/test_tensorflow.py

lint: venv # style
	.venv/bin/ruff check && .venv/bin/ruff format --check

bench: venv # speeds, against ceilings and the plain way
	@source common/env.sh && cd bench && "$${PYTHON[@]}" bench.py $(BENCH)

rehearse: # what a lesson takes: make rehearse LESSON=exercise8 REHEARSE="--small --students 20"
	@$(PYTHON) bench/rehearse.py "$(LESSON)" $(REHEARSE)

pages: venv # a page for each pair, to read and to project, in build/pages
	.venv/bin/python docs/pages/build.py

venv: .venv/installed # PyTorch and the other packages, in .venv

.venv/installed: requirements.txt cinic_lab/requirements.txt docs/pages/requirements.txt
	@echo "Installing PyTorch and others in .venv: some GB, mostly a few minutes"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install $(QUIET) --disable-pip-version-check $(^:%=-r %)
	touch $@

venv-tensorflow: .venv-tensorflow/installed # TensorFlow, in .venv-tensorflow

.venv-tensorflow/installed: dp_ddp_intro/tensorflow/requirements.txt
	@echo "Installing TensorFlow in .venv-tensorflow: some GB, mostly a few minutes"
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/pip install $(QUIET) --disable-pip-version-check -r $<
	touch $@
