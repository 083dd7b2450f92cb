"""BatchNorm over the images of all processes: PyTorch's on GPUs, by hand on CPUs.

BatchNorm (Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, algorithm 1) computes

    y = (x - mean) / sqrt(var + eps) * weight + bias

for each channel, with mean and var of the images that a process has in this step.
SyncBatchNorm takes those of all processes. PyTorch's raises an error on a CPU.
"""

import torch
import torch.distributed as dist
from torch import nn


def sync_batchnorm(model, device):
    """Return the model with its BatchNorm layers synchronised; do it before DDP.

    Weights, running statistics and all names in state_dict() stay as they are.
    Without a GPU this changes the nn.BatchNorm2d layers of the model itself.
    """
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for layer in model.modules():
        if type(layer) is nn.BatchNorm2d:
            layer.__class__ = SyncBatchNorm2d  # the same layer, another forward()
    return model


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over the images of all processes, which all take part at once."""

    def forward(self, x):
        """Normalise x (N, C, H, W). N may differ between processes, from 1 on."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if alone or not self.training:
            return super().forward(x)
        values = x.float()  # autocast's 16 bits would be too few for sums
        var, mean = torch.var_mean(values, (0, 2, 3), correction=0)  # (C,), its own
        count = mean.new_tensor([x.numel() / len(mean)])  # of values in a channel
        rows = AllGather.apply(torch.cat([mean, var, count]))  # (processes, 2C + 1)
        means, variances, counts = rows.split([len(mean), len(mean), 1], dim=1)
        # The variance of the whole is the mean of the parts' variances, and the
        # variance of their means. (Chan, Golub and LeVeque, 1983. The mean of x * x,
        # less mean * mean, is the same on paper, but loses digits if mean is large.)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * total / (total - 1), self.momentum)
        scale = self.weight / torch.sqrt(var + self.eps)
        mean, scale, bias = (v.view(-1, 1, 1) for v in (mean, scale, self.bias))
        return ((values - mean) * scale + bias).to(x.dtype)


class AllGather(torch.autograd.Function):
    """Rows (K,) of all processes to a table (processes, K), differentiable."""

    @staticmethod
    def forward(ctx, row):
        table = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(table, row)
        return torch.stack(table)

    @staticmethod
    def backward(ctx, grad):
        """All used this process's row, so its gradient is the sum of all theirs."""
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]
