"""How a script computes a printed number from those that it has read in a loop."""

from collections import namedtuple

# The values values[offset::stride] of a loop, and how they become one number.
Formula = namedtuple("Formula", "name stride offset divisor")


def compute(formula, values, sizes):
    """Return the number that the formula gives, or None if there are too few values.

    sizes: the sizes of the loop's batches, which may weight their values.
    """
    part = values[formula.offset :: formula.stride]
    weights = sizes[: len(part)]
    if len(part) < 1 + (formula.name == "ratio") or not formula.divisor:
        return None
    if formula.name == "weighted":
        total = sum(v * n for v, n in zip(part, weights, strict=False))
        return total / sum(weights) if sum(weights) else None
    if formula.name == "ratio":
        return part[0] / part[1] if part[1] else None
    total = {"last": part[-1], "sum": sum(part), "mean": sum(part) / len(part)}
    return total[formula.name] / formula.divisor


def formulas(values, loop, reduced):
    """Return the formulas for numbers that were read in a loop, or outside of loops.

    reduced: whether they were reduced before, perhaps together in one tensor.
    """
    found = [Formula("ratio", 1, -i, 1) for i in range(2, 9 if reduced else 3)]
    if loop is None:
        return [*found, Formula("last", 1, 0, 1), Formula("mean", 1, 0, 1)]
    subsets = loop.source[2]
    own = len(subsets[0]) if subsets else loop.base_length
    counts = {sum(loop.sizes), own, loop.base_length, loop.batches, 1}
    # A line may read several numbers per batch.
    per_batch = len(values) / max(1, loop.batches)
    strides = {1, int(per_batch)} if per_batch in (2, 3, 4) else {1}
    for stride in sorted(strides):
        for offset in range(stride):
            for name in ("mean", "weighted"):
                found.append(Formula(name, stride, offset, 1))
            for count in counts:
                found.append(Formula("last", stride, offset, count))
                found.append(Formula("sum", stride, offset, count))
    return found


def shows(text, value):
    """Return whether a printed number may be this one."""
    decimals = len(text.partition(".")[2])
    exact = decimals > 0 or value % 1 == 0  # whole numbers are counts; NaN is none
    return exact and text in (repr(value), f"{value:.{decimals}f}")
