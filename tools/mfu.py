"""Model FLOPs utilisation (MFU): a run's FLOP/s divided by its device's peak.

    cd cifar100_demo    # or dp_ddp_intro
    python ../tools/mfu.py logs/results.jsonl
    python ../tools/mfu.py logs/results.jsonl --check logs/check-JOB.json

Counts the FLOPs of the model's convolutions and matrix products, forward and
backward. What a run computes twice to save memory counts once, and causal attention
counts as if no token were masked.

The peak is the one for the run's format: float32 (TF32 where the GPU has it) or 16
bits. It comes from the data sheet, without sparsity, or with --check from the matrix
products that check.py measured. CPUs need --check.
"""

import argparse
import json
import os
import sys
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.errors import run as run_main
from compare import print_table
from results import read_runs

# {PyTorch's name of a GPU: TFLOP/s in (float32, 16 bits)}, without sparsity. Many
# data sheets print the values with sparsity, which are twice as high.
PEAKS = {
    # nvidia.com: nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-PCIE-40GB": (156, 312),
    "NVIDIA A100 80GB PCIe": (156, 312),
    "NVIDIA A100-SXM4-40GB": (156, 312),
    "NVIDIA A100-SXM4-80GB": (156, 312),
    # https://www.nvidia.com/en-us/data-center/h100/
    "NVIDIA H100 PCIe": (378, 756.5),
    "NVIDIA H100 NVL": (417.5, 835.5),
    "NVIDIA H100 80GB HBM3": (494.5, 989.5),
    # https://www.nvidia.com/en-us/data-center/h200/
    "NVIDIA H200": (494.5, 989.5),
    # https://www.nvidia.com/en-us/data-center/l4/
    "NVIDIA L4": (60, 121),
    # nvidia.com: volta-v100-datasheet-update-us-1165301-r5.pdf
    "Tesla V100-PCIE-16GB": (14, 112),
    "Tesla V100-PCIE-32GB": (14, 112),
    "Tesla V100-SXM2-16GB": (15.7, 125),
    "Tesla V100-SXM2-32GB": (15.7, 125),
    # nvidia.com: t4-tensor-core-datasheet-951643.pdf
    "Tesla T4": (8.1, 65),
    # nvidia.com: nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    "NVIDIA GeForce RTX 3090": (35.6, 71),
    # nvidia.com: nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 4090": (82.6, 165.2),
    # Half of the card:
    # https://gpuopen.com/learn/amd-lab-notes/amd-lab-notes-matrix-cores-readme/
    "AMD Instinct MI250X": (47.9, 191.5),
}


def read_check(file):
    """Return what check.py measured, in the form of PEAKS."""
    peaks = {}
    try:
        check = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}; run check.py first") from None
    if check.get("gpus_shared"):
        text = f"in {file} several ranks shared a GPU"
        raise UserError(f"{text}; run check.py with one process per GPU")
    for process in check["processes"]:
        tflops = {k: v for k, v in process.items() if k.endswith("_tflops")}
        # The fastest: where 16 bits are slower, --amp stays in float32.
        peaks[process["device"]] = tflops["float32_tflops"], max(tflops.values())
    return peaks


def count_flop(options):
    """Return the FLOPs of training on one image, or on one token."""
    if options.keys() >= {"arch", "image_size"}:
        return count_image_flop(options["arch"], options["image_size"])
    if options.keys() >= {"layers", "width", "heads", "length"}:
        sizes = [options[name] for name in ("layers", "width", "heads", "length")]
        return count_token_flop(*sizes)
    lessons = "cifar100_demo, dp_ddp_intro and beyond_ddp"
    raise UserError(f"only models of {lessons} can be counted: run mfu.py there")


@cache
def count_image_flop(arch, image_size):
    """Return count_flop() of the models in cifar100_demo/."""
    from get_parameters import count_costs

    return count_costs(arch, 2, image_size)["training"]


@cache
def count_token_flop(layers, width, heads, length):
    """Return count_flop() of the transformer in dp_ddp_intro/ and beyond_ddp/."""
    from model import Transformer

    with torch.device("meta"):  # tensors have shapes but no data
        model = Transformer(layers, width, heads, length)
        tokens = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(tokens)[0], tokens[0]).backward()
    return counter.get_total_flops() / length


def uses_16_bits(options):
    """Return whether a run with these options asks for bfloat16 or float16."""
    if options.get("dtype"):
        return options["dtype"] != "fp32"
    return bool(options.get("amp") or options.get("bf16"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="RESULTS.jsonl", help="runs of one exercise")
    parser.add_argument(
        "--check", metavar="FILE", help="check.py's file of this machine"
    )
    args = parser.parse_args()
    runs = read_runs([args.file])
    peaks = PEAKS | (read_check(args.check) if args.check else {})
    sys.path.append(os.getcwd())  # count_flop() needs the exercise's model
    unit, unknown = runs[0]["unit"], set()
    lines = [["script", "GPUs", "batch", f"{unit}/s", f"GFLOP per {unit[:-1]}"]]
    lines[0] += ["TFLOP/s per GPU", "format", "peak", "MFU"]
    for run in runs:
        half = uses_16_bits(run["options"])
        flop = count_flop(run["options"])
        gpus = run["gpus_shared"] or run["gpus"]
        tflops = run["speed"] * flop / gpus / 1e12
        line = [run["name"], str(gpus), str(run["batch"])]
        line += [f"{run['speed']:.1f}", f"{flop / 1e9:.3g}", f"{tflops:.3g}"]
        line.append("16 bits" if half else "float32")
        device = run["cpu"] if run["processor"] == "CPU core" else run["processor"]
        if device in peaks:
            peak = peaks[device][half]
            line += [f"{peak:.3g}", f"{tflops / peak:.0%}"]
        else:
            line += ["?", "?"]
            unknown.add(f"no peak for {device}: measure it, and add --check FILE")
        lines.append(line)
    print_table(lines, sorted(unknown))


if __name__ == "__main__":
    run_main(main)
