"""Loss and accuracy, summed on the device, because .item() makes the CPU wait."""

import math

import torch

from common.errors import UserError


def batch_sums(loss, *correct):
    """Return [loss_sum, correct, ..., count] of a batch, a tensor on its device.

    loss: the mean over the batch, a scalar tensor; correct: a bool tensor (N,) for
    each accuracy. Unlike means, sums add up over batches and ranks of any size.
    """
    loss_sum = loss.detach() * len(correct[0])
    count = torch.full_like(loss_sum, len(correct[0]))  # on the device
    return torch.stack([loss_sum, *(column.sum() for column in correct), count])


def to_metrics(sums, *names, check_finite=False):
    """Return {"loss": mean, "accuracy": %} from sums; this waits for the device.

    names: the accuracies' names, if there are several. check_finite: raise UserError
    if the loss is inf or NaN. Use it for training only, because in fp16 a validation
    loss may overflow in the first epochs.
    """
    loss_sum, *correct, count = sums.tolist()
    loss = loss_sum / count
    if check_finite and not math.isfinite(loss):
        raise UserError(f"the loss is {loss}: use a smaller --lr, or 32 bits")
    percent = [100 * number / count for number in correct]
    return {"loss": loss, **dict(zip(names or ["accuracy"], percent, strict=True))}
