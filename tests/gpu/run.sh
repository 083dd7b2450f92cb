#!/bin/bash
# Tests everything that needs a GPU, on one GPU or several. On one, two ranks share it, by
# NCCL 2.30 or later.
#
#     make test-gpu                           all rows: five to ten minutes
#     make test-gpu GPU="-k 'ResNet or mnist'"    rows with one of these words; or any
#                                             other option of pytest
#     make test-gpu GPU="-m few"              a part, which CPU cores can do as well
#     RECORD=1 make test-gpu                  write losses.json anew, on CPU cores
#
# Exit status: 1 if a row failed, 2 without a GPU.

set -euo pipefail
CDPATH= cd "$(dirname "$0")/../.."
source common/env.sh
export RECORD=${RECORD:-} WANDB_MODE=offline
export NCCL_MULTI_RANK_GPU_ENABLE=1 # for two ranks on one GPU
# To ask whether there is a GPU must not open it before processes are forked.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
if [[ $RECORD ]]; then
    export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1
fi
machine=$("${PYTHON[@]}" -c '
import torch
gpus = torch.accelerator.device_count()
name = torch.get_device_module().get_device_name() if gpus else "GPUs"
print(gpus, name, "PyTorch", torch.__version__)')
if [[ $machine == 0* && ! $RECORD && $* != *few* ]]; then
    echo "Error: PyTorch finds no GPU; type \`make test-gpu GPU=\"-m few\"\`" >&2
    exit 2
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export DATADIR=$scratch/data
for lesson in exercise8 mnist_multigpu cifar100_demo cinic_lab; do
    scale=0.2
    [[ $lesson != cinic_lab ]] || scale=0.4
    (cd $lesson && "${PYTHON[@]}" sample_data.py --to "$DATADIR" --scale $scale) > /dev/null
done
(cd beyond_ddp && "${PYTHON[@]}" write_shards.py --tokens 1024) > /dev/null

export RESULTS=$PWD/build/test-gpu
mkdir -p "$RESULTS"
cd tests/gpu
pytest() { "${PYTHON[@]}" -m pytest --basetemp "$scratch/rows" "$@"; }
if [[ $RECORD ]]; then
    pytest rows_together.py::test_training_script -n 4 "$@"
    exit
fi
# Rows that measure a speed or fill the memory have the machine to themselves. Of the others
# four at a time: eight ranks at most.
failed=0
for rows in together alone; do
    workers=4 status=0
    [[ $rows != alone ]] || workers=0
    pytest "rows_$rows.py" -n $workers --junitxml "$RESULTS/$rows.xml" \
        -o junit_suite_name="$machine" "$@" || status=$?
    case $status in
        1) failed=1 ;;
        [2-4]) exit $status ;; # Ctrl-C, or no such option; 5: no such row
    esac
done
tar --create --gzip --file "$RESULTS.tar.gz" --directory "${RESULTS%/*}" test-gpu
echo "Please send $RESULTS.tar.gz"
exit $failed
