"""SyncBatchNorm for CPUs: what PyTorch's layer does on GPUs, written out.

BatchNorm (Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, algorithm 1) computes

    y = (x - mean) / sqrt(var + eps) * weight + bias

per channel, with the mean and variance of the images in this process's batch.
SyncBatchNorm takes them over all processes. PyTorch's raises an error on a CPU.
"""

import torch
import torch.distributed as dist
from torch import nn


def sync_on_cpu(module):
    """Return a module with its nn.SyncBatchNorm layers replaced by SyncBatchNorm2d.

    Call it before DDP and the optimizer: the parameters are new, with the same
    values. The keys of state_dict() stay the same.
    """
    if isinstance(module, nn.SyncBatchNorm):
        layer = SyncBatchNorm2d(module.num_features, module.eps, module.momentum)
        layer.load_state_dict(module.state_dict())
        return layer
    for name, child in module.named_children():
        setattr(module, name, sync_on_cpu(child))
    return module


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over the images of all processes; all must call it together."""

    def forward(self, x):
        """Return x (N, C, H, W) normalised; N >= 1 may differ between processes."""
        if not self.training:
            return super().forward(x)
        values = x.float()  # 16 bits are too few for sums
        var, mean = torch.var_mean(values, (0, 2, 3), correction=0)  # (C,), local
        count = mean.new_tensor([x.numel() / len(mean)])  # values per channel
        rows = AllGather.apply(torch.cat([mean, var, count]))  # (processes, 2C + 1)
        means, variances, counts = rows.split([len(mean), len(mean), 1], dim=1)
        # Total variance: the mean of the local variances plus the variance of the
        # local means (Chan, Golub and LeVeque, 1983). mean(x * x) - mean * mean is
        # equal on paper, but loses digits when the mean is large.
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
    """A differentiable all_gather: (K,) per process to (processes, K)."""

    @staticmethod
    def forward(ctx, row):
        table = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(table, row)
        return torch.stack(table)

    @staticmethod
    def backward(ctx, grad):
        """Return the row's gradient, summed over the processes that used it."""
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]
