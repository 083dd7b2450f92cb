"""Train a small CNN with tensor parallelism to classify four shapes.

    sbatch run-2gpus.sh patient10.py

It prints the training loss of each epoch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from common.device import get_device, get_ranks
from common.errors import run
from dataset import shapes


class Net(nn.Module):
    """A CNN; each rank has all convolutions, and a part of the linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden = nn.Linear(32 * 8 * 8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.conv1(x).relu()
        x = self.conv2(x).relu()
        x = self.hidden(x.flatten(1)).relu()
        return self.head(x)

    def init_weights(self, rank, device):
        """Draw the weights: a model that was built on "meta" has none."""
        whole = torch.Generator(device).manual_seed(0)
        shard = torch.Generator(device).manual_seed(1 + rank)  # FIX: unequal halves
        for p in self.parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            rng = shard if isinstance(p, DTensor) else whole
            if p.dim() == 1:  # a bias
                nn.init.zeros_(local)
            else:
                nn.init.kaiming_uniform_(local, a=5**0.5, generator=rng)


def main():
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    torch.manual_seed(0)  # all ranks train on the same batches
    dist.init_process_group()

    loader = DataLoader(shapes(2048), 64, shuffle=True)
    with torch.device("meta"):
        model = Net()
    mesh = dist.init_device_mesh(device.type, (world_size,))
    plan = {"hidden": tp.ColwiseParallel(), "head": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh, plan)
    model.to_empty(device=device)
    model.init_weights(rank, device)
    optimizer = torch.optim.Adam(model.parameters(), 0.003, foreach=False)
    for epoch in range(1, 7):
        loss_sum = torch.zeros((), device=device)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
        if rank == 0:
            print(f"Epoch {epoch}: loss {loss_sum / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
