"""DDP with nothing but PyTorch, to copy and change.

    torchrun --standalone --nproc-per-node=2 plain_ddp.py

Each process uses one GPU or, without GPUs, one CPU core. To share one GPU, put
NCCL_MULTI_RANK_GPU_ENABLE=1 in front (NCCL 2.30, which comes with PyTorch 2.14).
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, WIDTH = 256, 64, 128


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        mlp = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(*mlp)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x + self.mlp(self.norm2(x)))


def make_data():
    """Return a data set of random tokens, most of which follow from the one before.

    The seed is fixed, so that every process makes the same data.
    """
    generator = torch.Generator().manual_seed(0)
    successor = torch.randperm(VOCABULARY, generator=generator)
    noise = torch.rand(1024, LENGTH + 1, generator=generator) < 0.1
    tokens = torch.randint(VOCABULARY, noise.shape, generator=generator)
    for i in range(1, LENGTH + 1):
        follows = successor[tokens[:, i - 1]]
        tokens[:, i] = torch.where(noise[:, i], tokens[:, i], follows)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def main():
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])  # set by torchrun
        gpu = local_rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(gpu)
        device = torch.accelerator.current_accelerator()
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())  # DDP copies rank 0's weights to all ranks

    train_set = make_data()
    ddp_model = DDP(Transformer().to(device))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)  # 16 per process
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.003)
    for epoch in range(1, 5):
        sampler.set_epoch(epoch)  # a new order in every epoch
        loss_sum = torch.zeros((), device=device)
        for tokens, targets in loader:
            logits = ddp_model(tokens.to(device)).flatten(0, 1)
            loss = cross_entropy(logits, targets.to(device).flatten())
            loss_sum += loss.detach()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        if dist.get_rank() == 0:
            loss = loss_sum.item() / len(loader) / dist.get_world_size()
            print(f"Epoch {epoch}: train loss {loss:.4g}")
    dist.destroy_process_group()


# A loader's workers may import this file: they must not train as well.
if __name__ == "__main__":
    main()
