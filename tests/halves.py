"""Ten steps of a script's train() on batches of 20, of which each rank has a share.

Saves the weights to WORLD_SIZE.pt. Without augmentation, which is random.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(sys.argv[1]).parent))
module = __import__(Path(sys.argv[1]).stem)
module.augment = lambda images: images
rank, world_size = (
    int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1))
)

torch.manual_seed(0)
images = torch.randint(0, 256, (10, 20, 3, 150, 150), dtype=torch.uint8)
labels = torch.randint(0, 2, (10, 20)).float()
share = slice(rank * 20 // world_size, (rank + 1) * 20 // world_size)
loader = [(i[share], y[share]) for i, y in zip(images, labels, strict=True)]
model = wrapped = module.Classifier("tinyvgg", "imagenet")
model.features[:24].requires_grad_(False)
before = {k: v.clone() for k, v in model.state_dict().items()}
if world_size > 1:
    dist.init_process_group()
    wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
means = module.train(wrapped, loader, optimizer, torch.device("cpu"))
if rank == 0:
    seen = {"before": before, "after": model.state_dict(), "means": means}
    torch.save(seen, f"{world_size}.pt")
if world_size > 1:
    dist.destroy_process_group()
