"""Train a small model with DDP, with one bug that gives no error."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(512, 16)
    dataset = TensorDataset(images, (images.sum(1) > 0).long())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32, sampler=sampler)
    for epoch in range(3):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        last_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(last_loss)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch}: loss of the last batch {last_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
