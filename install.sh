#!/bin/bash
# Makes .venv with PyTorch and the packages of these files; `make venv` starts it.
#     bash install.sh PYTHON REQUIREMENTS.txt ...
#     TORCH=cu126 make venv      another PyTorch: docs/CLUSTER.md#which-pytorch
# TORCH names an index of PyTorch's own wheels; common/sites/NAME.sh may set it, too. Without
# it PyPI's are installed, for NVIDIA's newest GPUs. Where neither a GPU nor Slurm is, it is
# cpu: CUDA is nearly all of the 6 GB.

set -euo pipefail
python=$1
shift
index=${TORCH_INDEX:-https://download.pytorch.org/whl}
pip=(.venv/bin/pip --disable-pip-version-check)
[[ -t 2 ]] || pip+=(--quiet) # on a terminal it shows bars

ask_site() { # run a command as env.sh and the site's file would have it
    (source common/env.sh &> /dev/null || true; "$@")
}
answers='import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)'
there=$(cat .venv/installed 2> /dev/null || true)
TORCH=${TORCH:-$(ask_site eval 'echo "${TORCH:-}"')} TORCH=${TORCH:-$there}
if [[ ! $TORCH ]] && ! ask_site has_driver && ! command -v sbatch > /dev/null &&
    "$python" -c "$answers" "$index/cpu/torch/" &> /dev/null; then
    TORCH=cpu
    echo "No GPU and no Slurm here: PyTorch for CPUs alone (TORCH=cu126 in front: for GPUs)"
fi

"$python" -m venv .venv
if [[ $TORCH ]]; then
    echo "Installing PyTorch from $index/$TORCH in .venv"
    if [[ $TORCH != "$there" ]]; then # else pip keeps the other one
        "${pip[@]}" uninstall --yes torch torchvision &> /dev/null
    fi
    "${pip[@]}" install torch torchvision --index-url "$index/$TORCH"
else
    echo "Installing PyTorch in .venv: 6 GB, usually a few minutes"
fi
"${pip[@]}" install "${@/#/--requirement=}"
echo "$TORCH" > .venv/installed
