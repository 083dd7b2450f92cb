"""Ten steps of a script's train() on batches of 40, of which each rank has a share.

Saves the weights to WORLD_SIZE.pt. Without dropout, which is random.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(sys.argv[1]).parent))
from common.log import RunLog

module = __import__(Path(sys.argv[1]).stem)
rank, world_size = (
    int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1))
)


class Batches(list):
    dataset = range(400)


torch.manual_seed(0)
images = torch.randint(0, 256, (10, 40, 1, 28, 28), dtype=torch.uint8)
labels = torch.randint(0, 10, (10, 40))
share = slice(rank * 40 // world_size, (rank + 1) * 40 // world_size)
loader = Batches((i[share], y[share]) for i, y in zip(images, labels, strict=True))
model = wrapped = module.make_model()
for layer in model:
    if isinstance(layer, torch.nn.Dropout):
        layer.p = 0
before = {k: v.clone() for k, v in model.state_dict().items()}
if world_size > 1:
    dist.init_process_group()
    wrapped = DistributedDataParallel(model)
optimizer = module.OPTIMIZERS["adadelta"](model.parameters(), None)
args = Namespace(log_interval=4, batch_size=40 // world_size)
device = torch.device("cpu")
log = RunLog(args, device, world_size, enabled=rank == 0, scalars=False)
module.train(args, wrapped, device, loader, optimizer, 1, log)
torch.save(
    {"before": before, "after": model.state_dict()}, f"{world_size}.{rank}.pt"
)
if world_size > 1:
    dist.destroy_process_group()
