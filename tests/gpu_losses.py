"""The losses of a CPU, with which those of a GPU are compared.

losses.json has them: they are recorded once, so that a GPU's machine need not train
on its CPU, and so that a changed script does not agree with itself.
"""

import json
import re
from pathlib import Path

from gpu_jobs import Failed

FILE = Path(__file__).with_name("losses.json")
# Of the last loss of a transformer, which draws nothing on the GPU: it was a CPU's
# within 0.1 % on an H200, with TF32 as well. And of a CNN's first training losses.
TOLERANCE = 0.005
# Of a CNN's last losses of the evaluation: Adadelta, too, multiplies what rounding
# has changed.
EVALUATION_TOLERANCE = 0.02
BATCHES = 3  # whose losses are compared
# Of the first loss, before rounding has changed a weight.
SIXTEEN_BITS_TOLERANCE = 0.03


def load():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def save(rows):
    """Write the losses of these rows of gpu_rows.train(), a line for each script."""
    losses = load()
    for script, row in rows.items():
        losses[script] = {"printed": row["printed"]}
        if "ranks" in row:
            losses[script] = {"ranks": [shorten(rank) for rank in row["ranks"]]}
    lines = [f'"{name}": {json.dumps(losses[name])}' for name in sorted(losses)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def shorten(rank):
    """Return what is compared of a rank's losses."""
    training, evaluation = rank["training"], rank["evaluation"]
    return {"training": training[:BATCHES], "evaluation": evaluation[-BATCHES:]}


def find_losses(output):
    """Return the losses that a script printed."""
    return [float(n) for n in re.findall(r"[Ll]oss:?\s+(\d+\.\d+)", output)]


def check(found, expected, tolerance, what):
    """Raise Failed if a loss is far from a CPU's; return its relative distance."""
    distance = abs(found - expected) / abs(expected)
    if not distance <= tolerance:  # as with NaN
        raise Failed(f"{what}: {found:.4g}, but {expected:.4g} on a CPU")
    return round(distance, 6)


def compare(row, expected):
    """Compare a row's losses with a CPU's; raise Failed if they are others."""
    if expected is None:
        raise Failed(f"not in {FILE.name}: `make test-gpu GPU=--record` on a CPU")
    if "ranks" not in row:
        found, wanted = row["printed"], expected["printed"]
        if len(found) != len(wanted):
            raise Failed(f"{len(found)} losses, but {len(wanted)} on a CPU")
        far = check(found[-1], wanted[-1], TOLERANCE, "the last loss")
        return {"far_from_cpu": far}
    if len({rank["weights"] for rank in row["ranks"]}) > 1:
        raise Failed("the ranks' weights differ after the last step")
    distances = []
    tolerances = {"training": TOLERANCE, "evaluation": EVALUATION_TOLERANCE}
    ranks = zip(row["ranks"], expected["ranks"], strict=True)
    for rank, (found, wanted) in enumerate(ranks):
        for part, losses in shorten(found).items():
            pairs = zip(losses, wanted[part], strict=True)
            for number, pair in enumerate(pairs, start=1):
                what = f"rank {rank}, {part}, loss {number}"
                distances.append(check(*pair, tolerances[part], what))
    return {"far_from_cpu": max(distances)}
