"""Gradients in bf16 by a hook, and a compiled model."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(nn.functional.dropout(self.hidden(x), 0.1, self.training))


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    net = Net()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(None, bf16_compress_hook)
    # BUG gradients: model = torch.compile(net, backend="eager")
    model = torch.compile(ddp, backend="eager")
    # BUG seeds: torch.manual_seed(0)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 8, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        # BUG set-epoch: pass
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        # BUG own-number: pass
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(get_args())
