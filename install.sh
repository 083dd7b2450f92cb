#!/bin/bash
# Makes .venv with PyTorch and the packages in these files, for `make venv`.
#     bash install.sh PYTHON REQUIREMENTS.txt ...
#     TORCH=cu126 make venv      another PyTorch: docs/PYTORCH.md#which-pytorch
# TORCH names an index of PyTorch's wheels; common/sites/NAME.sh can set it. The default is
# PyPI's PyTorch, for NVIDIA's newest GPUs, or cpu on a machine with neither a GPU nor Slurm,
# because CUDA takes nearly all of the 6 GB.

set -euo pipefail
if [[ -f exercise8/common ]]; then # a file with the link's text, from a ZIP or on Windows
    echo "Error: this copy lost its symbolic links: run \`git config core.symlinks true\` and" \
        "\`git restore .\`; on Windows, clone it in WSL" >&2
    exit 2
fi
python=$1
shift
index=${TORCH_INDEX:-https://download.pytorch.org/whl}
pip=(.venv/bin/pip --disable-pip-version-check)
quiet= # progress bars only on a terminal
[[ -t 2 ]] || quiet=--quiet

# uv takes a third of pip's time. It does not read pip.conf, so if uv fails, pip tries again. The
# cache in .venv lets uv make hard links, and takes no space in a home with a quota.
install() {
    local uv
    uv=$(type -P uv || { "${pip[@]}" install $quiet uv >&2 && echo .venv/bin/uv; }) &&
        "$uv" pip install $quiet --python .venv/bin/python --cache-dir .venv/cache "$@" ||
        "${pip[@]}" install $quiet "$@"
    rm -rf .venv/cache
}

with_site() { # run a command with the settings of env.sh and of the site's file
    (source common/env.sh &> /dev/null || true; "$@")
}
open_url='import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)'
installed=$(cat .venv/installed 2> /dev/null || true)
# Without SBATCH_ACCOUNT, some sites' files end this subshell, because they need the account to
# find a course's data. The data is not needed here, so that does no harm.
TORCH=${TORCH:-$(with_site eval 'echo "${TORCH:-}"' || true)} TORCH=${TORCH:-$installed}
if [[ ! $TORCH ]] && ! with_site has_driver && ! command -v sbatch > /dev/null &&
    "$python" -c "$open_url" "$index/cpu/torch/" &> /dev/null; then
    TORCH=cpu
    echo "No GPU and no Slurm here: installing PyTorch for CPUs (for GPUs: TORCH=cu126 make venv)"
fi

if ! "$python" -m venv .venv; then # on Ubuntu it prints which package is missing
    [[ -f .venv/installed ]] || rm -rf .venv
    exit 1
fi
if [[ $TORCH ]]; then
    echo "Installing PyTorch from $index/$TORCH in .venv"
    if [[ $TORCH != "$installed" ]]; then # or pip would keep the old one
        "${pip[@]}" uninstall --yes torch torchvision &> /dev/null
    fi
    install torch torchvision --index-url "$index/$TORCH"
else
    echo "Installing PyTorch in .venv: 6 GB, usually a few minutes"
fi
install "${@/#/--requirement=}"
echo "$TORCH" > .venv/installed
