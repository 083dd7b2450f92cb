"""Checks of what a loss is made of."""

from ddp_checkup.checks.ranks import no_replicas
from ddp_checkup.checks.verdicts import OK, check, found, unseen


@check(
    "what the ranks gather for the loss has a gradient",
    seen="the graph of autograd from the loss to what was gathered, and the labels",
    fix="Use torch.distributed.nn.functional.all_gather(), or put this rank's own "
    "tensor back in its place among the gathered ones.",
    level="warning",
)
def gathered(ranks):
    for line in (r.cut_off for r in ranks if r.cut_off):
        text = "to backward() all gathered tensors are constants, the rank's own too"
        return found(f"{line}: {text}")
    for line, labels in ranks[0].contrasts.items():
        alike = all(r.contrasts.get(line) == labels for r in ranks)
        if len(labels) > 2 and alike:
            text = "all ranks have the same labels, while the gathered tensors have"
            text += " each rank's in another place"
            fix = "Add rank * batch_size to the labels."
            return found(f"{line}: {text}", fix=fix)
    none = "all_gather() was not called before a loss"
    return OK if any(r.gathers for r in ranks) else unseen(none)


@check(
    "all ranks weight the classes alike in the loss",
    seen="the class weights of cross_entropy(), nll_loss() and BCEWithLogitsLoss",
    fix="Count the classes of all samples, or sum the ranks' counts by "
    "dist.all_reduce(), before you compute the weights.",
)
def class_weights(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    for line in ranks[0].class_weights:
        by_rank = [[*r.class_weights.get(line, {}).values()] for r in ranks]
        # Weights that change from step to step may be those of samples.
        constant = all(len(its) > 2 and its == its[:1] * len(its) for its in by_rank)
        if constant and any(its[0] != by_rank[0][0] for its in by_rank):
            return found(f"{line}: the ranks' weights differ in all steps")
    return OK if ranks[0].class_weights else unseen("no loss had weights")
