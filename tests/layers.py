"""One step of model_parallel.py on a batch of 10, in 1, 2 and 4 micro-batches.

Each rank saves what its half made to RANK.pt.
"""

import sys

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[1])
import model_parallel as module

from dataset import random_sequences
from model import Transformer

dist.init_process_group()
rank, seen = dist.get_rank(), {}
torch.manual_seed(0)
model = Transformer(3, 32, 4, 16)
layers = model.stages([rank], 2)[0]
outputs = []
layers.register_forward_hook(
    lambda _, given, output: outputs.append(output.detach())
)
tokens, targets = random_sequences(10, 16).__getitems__(range(10))
for micro_batches in (1, 2, 4):
    outputs.clear()
    layers.zero_grad()
    if rank == 0:
        module.first_half(layers, tokens.chunk(micro_batches))
        loss = None
    else:
        loss = module.second_half(layers, targets.chunk(micro_batches), 32)
    seen[micro_batches] = {
        "gradients": [p.grad.clone() for p in layers.parameters()],
        "output": torch.cat(outputs),
        "pieces": len(outputs),
        "loss": loss,
    }
torch.save(seen, f"{rank}.pt")
dist.destroy_process_group()
