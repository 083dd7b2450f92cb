"""Loss and accuracy: summed on the device, and read once per epoch.

Reading a number in every step (`.item()`) would make the host wait for the device.
"""

import math

import torch

from common.cli import UserError


def batch_sums(loss, *correct):
    """Return [loss_sum, correct, ..., count] of a batch, a tensor on its device.

    loss: the mean over the batch, a scalar tensor; correct: a bool tensor (N,) for
    each accuracy. Unlike means, sums add up over batches and ranks of any size.
    """
    count = torch.ones_like(correct[0]).sum()
    loss_sum = loss.detach() * len(correct[0])
    return torch.stack([loss_sum, *(which.sum() for which in correct), count])


def to_metrics(sums, *names):
    """Return {"loss": mean, "accuracy": %} from sums; this waits for the device.

    names: names of the accuracies, if there are several. Raises UserError if a
    training loss is inf or NaN. An early validation loss may be, in 16 bits.
    """
    loss_sum, *correct, count = sums.tolist()
    loss = loss_sum / count
    if torch.is_grad_enabled():
        check_finite(loss)
    percent = [100 * number / count for number in correct]
    return {"loss": loss, **dict(zip(names or ["accuracy"], percent, strict=True))}


def check_finite(loss):
    """Return this number; raise UserError if it is inf or NaN."""
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss}: use a smaller --lr, or --dtype fp32")
    return loss
