"""Loss and accuracy: summed on the device, and read once an epoch.

To read a number (`.item()`) in every step would make the host wait for the device.
"""

import torch


def batch_sums(loss, correct):
    """Return [loss_sum, correct, count] of a batch, a tensor on its device.

    loss: the batch's mean, a scalar tensor; correct: a bool tensor (N,). Unlike
    means, sums add up over batches and processes of different sizes.
    """
    count = torch.ones_like(correct).sum()
    return torch.stack([loss.detach() * len(correct), correct.sum(), count])


def means(sums):
    """Return sums as {"loss": mean, "accuracy": %}; this waits for the device."""
    loss_sum, correct, count = sums.tolist()
    return {"loss": loss_sum / count, "accuracy": 100 * correct / count}
