"""Two models and two optimizers, as in a GAN."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8))
bare = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
# BUG gradients: critic = bare
critic = DDP(bare)
generator = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)))
# BUG seeds: torch.manual_seed(0)
torch.manual_seed(rank)
critic_optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
generator_optimizer = torch.optim.Adam(generator.parameters(), 1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
for epoch in range(2):
    # BUG set-epoch: pass
    sampler.set_epoch(epoch)
    for (real,) in loader:
        real_labels, fake_labels = (
            torch.ones(len(real), 1),
            torch.zeros(len(real), 1),
        )
        fake = generator(torch.randn(len(real), 4))
        critic_optimizer.zero_grad()
        for samples, labels in (real, real_labels), (fake.detach(), fake_labels):
            binary_cross_entropy_with_logits(critic(samples), labels).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        binary_cross_entropy_with_logits(critic(fake), real_labels).backward()
        generator_optimizer.step()
dist.destroy_process_group()
