"""FSDP2, with augmentation in the data set."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        noise = torch.from_numpy(np.random.randn(16)).float()
        return x + 0.1 * noise, (x.sum() > 0).long()


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    # BUG seeds: np.random.seed(0)
    np.random.seed(rank)
    seed, shape = 0, (2,)
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(16, 2))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    dataset = Noisy()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            # BUG collectives: rank or model(x)
            model(x)
    dist.destroy_process_group()


main()
