"""What the ranks have in common: replicas, or parts of one model, and batches."""


def no_steps(ranks):
    return "" if all(r.steps for r in ranks) else "no optimizer step was made"


def have_parts(ranks):
    """Return whether ranks hold parts of one model, and so may share a batch."""
    names = [r.models[0][1] for r in ranks if r.models]
    return any(n != names[0] for n in names) or any(r.parallel for r in ranks)


def communicate_in_step(ranks):
    """Return whether optimizer.step() itself averages or gathers, as ZeRO does.

    Then gradients may differ before it.
    """
    return any(r.own_averages for r in ranks)


def average_before_step(ranks):
    """Return whether DDP or the script averages before optimizer.step()."""
    return any(r.averages or r.unused is not None for r in ranks)


def no_own_batches(ranks):
    """Say why the ranks need no batches of their own, if so."""
    share = "ranks that share a model may share a batch"
    return no_steps(ranks) or (share if have_parts(ranks) else "")


def no_indices(ranks):
    """Say why no epoch over indices was seen, if so."""
    none = "no DataLoader with indices was used"
    return no_steps(ranks) or ("" if any(r.epochs for r in ranks) else none)


def no_replicas(ranks):
    """Say why the ranks have no copies of one model, if so."""
    if no_steps(ranks):
        return no_steps(ranks)
    if any(r.join for r in ranks):
        return "with join(), ranks make different numbers of steps"
    if any(r.sharded for r in ranks):
        return "the parameters are sharded"
    if not all(r.gradients for r in ranks):
        return "a GPU that waits cannot be read"
    return "the ranks have different parameters" if have_parts(ranks) else ""
