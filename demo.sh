#!/bin/bash
# Runs `make demo`: makes a small data set, trains on one GPU and on two, and compares the runs.
# CPU cores stand in for missing GPUs; a machine with one GPU trains on it first.

set -euo pipefail
CDPATH= cd "$(dirname "$0")/exercise8"
source common/env.sh
export SMALL=0 # the options for GPUs and for CPU cores are the same here
options=(--backbone tinyvgg --epochs 10 --finetune-epochs 2)
gpus=0 runs=2

train() {
    echo
    bash "$@" "${options[@]}"
}

"${PYTHON[@]}" sample_data.py
export DATADIR=../data/sample
if has_driver; then
    gpus=$("${PYTHON[@]}" -c "import torch; print(torch.accelerator.device_count())")
fi
if ((gpus == 1)); then
    train run.sh pytorch_dvc_cnn_pretrained.py
    echo
    echo "That was your GPU. DDP needs two, so the rest runs on CPU cores."
    runs=3
fi
if ((gpus < 2)); then
    export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 # for AMD, '' means all GPUs
fi
unset SLURM_GPUS_ON_NODE # also in a job with another number of GPUs
export GPUS=2
train run.sh pytorch_dvc_cnn_pretrained.py
train run-2gpus.sh pytorch_dvc_cnn_pretrained_multigpu.py
tail -n $runs logs/results.jsonl | "${PYTHON[@]}" ../tools/compare.py /dev/stdin
