SHELL := /bin/bash
PYTHON ?= python3
DEMO := --backbone tinyvgg --epochs 10 --finetune-epochs 2
.PHONY: demo test test-cluster test-tensorflow lint bench venv venv-tensorflow

demo: venv # exercise 8 on one GPU and on two, or on CPU cores that play them
	@.venv/bin/python -m common.sample_data
	@source common/env.sh && gpus 2 && cd exercise8 && export DATADIR=../data/sample && \
	bash run.sh pytorch_dvc_cnn_pretrained.py $(DEMO) && echo && \
	bash run-2gpus.sh pytorch_dvc_cnn_pretrained_multigpu.py $(DEMO) && \
	tail -n 2 logs/results.jsonl | "$${PYTHON[@]}" -m common.compare /dev/stdin

test: lint
	.venv/bin/python -m pytest

test-cluster: venv # for root, on a machine with Slurm
	.venv/bin/python -m pytest -m cluster

test-tensorflow: venv-tensorflow # apart: TensorFlow has an environment of its own
	.venv-tensorflow/bin/python -m pytest --override-ini addopts= tests/test_tensorflow.py

lint: venv
	.venv/bin/ruff check && .venv/bin/ruff format --check

bench: venv
	@.venv/bin/python -m common.sample_data > /dev/null
	@source common/env.sh && cd bench && DATADIR=$${DATADIR:-../data/sample} \
	"$${PYTHON[@]}" bench.py

venv: .venv/installed

.venv/installed: requirements.txt cinic_lab/requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check \
		-r requirements.txt -r cinic_lab/requirements.txt
	touch $@

venv-tensorflow: .venv-tensorflow/installed

.venv-tensorflow/installed: requirements-tensorflow.txt
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/pip install --quiet --disable-pip-version-check -r requirements-tensorflow.txt
	touch $@
