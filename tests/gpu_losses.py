"""The losses of a CPU, with which those of a GPU are compared.

losses.json has them: they are recorded once, so that a GPU's machine need not train
on its CPU, and so that a changed script does not agree with itself.
"""

import json
import re
from pathlib import Path

from gpu_jobs import Failed

FILE = Path(__file__).with_name("losses.json")
# A transformer draws nothing on the GPU. Its last loss on a GPU was a CPU's within
# 0.1 %, with TF32 as well.
TRANSFORMER_TOLERANCE = 0.005
# Each step multiplies what rounding has changed, above all with BatchNorm: two CNNs
# that are equal at first have other losses after 20 steps.
CNN_STEPS, CNN_TOLERANCE = 5, 0.01
EVALUATION_TOLERANCE = 0.05
SIXTEEN_BITS_TOLERANCE = (
    0.03  # of the first loss, before rounding has changed a weight
)


def load(file):
    return json.loads(file.read_text()) if file.exists() else {}


def find_losses(output):
    """Return the losses that a script printed."""
    return [float(n) for n in re.findall(r"[Ll]oss:?\s+(\d+\.\d+)", output)]


def shorten(row):
    """Return what is compared of a row of gpu_rows.train()."""
    if "ranks" not in row:
        return {"printed": row["printed"]}
    ranks = [
        {"training": r["training"][:CNN_STEPS], "evaluation": r["evaluation"]}
        for r in row["ranks"]
    ]
    return {"ranks": ranks}


def check(found, expected, tolerance, what):
    """Raise Failed if a loss is far from a CPU's; return its relative distance."""
    distance = abs(found - expected) / abs(expected)
    if not distance <= tolerance:  # as with NaN
        raise Failed(f"{what}: {found:.4g}, but {expected:.4g} on a CPU")
    return distance


def compare(row, expected):
    """Compare a row's losses with a CPU's; raise Failed if they are others."""
    if expected is None:
        raise Failed(f"not in {FILE.name}: `make test-gpu GPU=--record` on a CPU")
    if "ranks" not in row:
        found, wanted = row["printed"], expected["printed"]
        if len(found) != len(wanted):
            raise Failed(f"{len(found)} losses, but {len(wanted)} on a CPU")
        far = check(found[-1], wanted[-1], TRANSFORMER_TOLERANCE, "the last loss")
        return {"far_from_cpu": far}
    if len({rank["weights"] for rank in row["ranks"]}) > 1:
        raise Failed("the ranks' weights differ after the last step")
    first, evaluation = [], []
    ranks = zip(row["ranks"], expected["ranks"], strict=True)
    for rank, (found, wanted) in enumerate(ranks):
        steps = zip(found["training"], wanted["training"], strict=False)
        for step, losses in enumerate(steps, start=1):
            what = f"rank {rank}, step {step}, loss"
            first.append(check(*losses, CNN_TOLERANCE, what))
        losses = found["evaluation"], wanted["evaluation"]
        what = f"rank {rank}, loss of the evaluation"
        evaluation.append(check(*losses, EVALUATION_TOLERANCE, what))
    far = {"far_from_cpu": max(first), "evaluation_far_from_cpu": max(evaluation)}
    return {name: round(distance, 6) for name, distance in far.items()}
