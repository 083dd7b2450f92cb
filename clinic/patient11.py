"""Train a small CNN with DDP; each rank updates a part of the weights, as in ZeRO.

    sbatch run-2gpus.sh patient11.py

It prints by which norm each rank clips its gradients in the last step.
"""

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import run
from dataset import shapes


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 4),
    )


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = shapes(2048)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 32, sampler=sampler)
    model = build_model().to(device)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    my_parameters = [*model.parameters()][rank::world_size]
    optimizer = torch.optim.SGD(my_parameters, 0.1, momentum=0.9)
    for epoch in range(1, 7):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        loss_sum = torch.zeros((), device=device)
        norms = torch.zeros(world_size, device=device)  # of the gradients, by rank
        for images, labels in loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            model.zero_grad()
            loss.backward()
            norms[rank] = clip_grad_norm_(my_parameters, 0.1)
            optimizer.step()
            for i, p in enumerate(model.parameters()):
                dist.broadcast(p.detach(), i % world_size)  # from its owner
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)  # DDP: the sum over all ranks
        dist.all_reduce(norms)
        if rank == 0:
            mean = loss_sum / world_size / len(loader)
            shown = ", ".join(f"{norm:.3f}" for norm in norms)
            print(f"Epoch {epoch}: loss {mean:.4f}, norms in the last step {shown}")
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
