"""A stream of samples, sharded over ranks and workers; metrics go to TensorBoard."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.tensorboard import SummaryWriter


class Stream(IterableDataset):
    def __init__(self, first, last):
        self.first, self.last = first, last

    def __iter__(self):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        shard = rank * workers + (worker.id if worker else 0)
        # BUG same-batch: shard, shards = worker.id if worker else 0, workers
        shards = world * workers
        for i in range(self.first + shard, self.last, shards):
            x = torch.randn(8, generator=torch.Generator().manual_seed(i))
            yield x, (x.sum() > 0).long()


dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp_model.parameters(), 0.1)
loader = DataLoader(Stream(0, 320), 8, num_workers=1)
val_loader = DataLoader(Stream(1000, 1120), 8)
writer = SummaryWriter(f"runs/{rank}")
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(ddp_model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:
            counts[0] += (model(x).argmax(1) == y).sum()
            counts[1] += len(y)
    # BUG own-number: pass
    dist.all_reduce(counts)
    writer.add_scalar("accuracy", (counts[0] / counts[1]).item(), epoch)
writer.close()
dist.destroy_process_group()
