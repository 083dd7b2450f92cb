"""Runs a CIFAR-100 script's main(), then its train() on shares of the same batches.

    spy_cifar.py SCRIPT [OPTIONS]

Saves to RANK.pt what this rank evaluated, the buffers that it did so with, the order
of its images in each epoch, and the weights before and after train().
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

script, *options = sys.argv[1:]
sys.argv = [script, *options]
sys.path.insert(0, str(Path(script).resolve().parent))
module = __import__(Path(script).stem)
rank, world_size = (
    int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1))
)
seen = {"orders": [], "random": [], "evaluated": [], "buffers": []}
train, evaluate = module.train, module.evaluate


def dry_train(args, model, device, train_loader, optimizer, scaler, log, profiler):
    """Move BatchNorm's means of this rank away from the others'; train nothing."""
    seen["orders"].append(list(train_loader.sampler))
    seen["random"].append(torch.rand(1).item())
    for buffer in model.buffers():
        buffer += rank
    return torch.ones(3)


def noting_evaluate(model, device, loader):
    result = evaluate(model, device, loader)
    seen["evaluated"].append((list(getattr(loader.dataset, "indices", [])), result))
    seen["buffers"].append({k: v.clone() for k, v in model.named_buffers()})
    return result


def noting_report(log, done, total, sums, start):
    seen["loss"] = (sums[0] / sums[2]).item()


module.train, module.evaluate = dry_train, noting_evaluate
module.report_iterations = noting_report
module.RunLog.bar = lambda log, loader, steps=None: loader
# main() ends the group; what comes after needs it.
destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None
module.main()

torch.manual_seed(0)
images = torch.randint(0, 256, (4, 12, 3, 32, 32), dtype=torch.uint8)
labels = torch.randint(0, 100, (4, 12))
share = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
loader = [(i[share], y[share]) for i, y in zip(images, labels, strict=True)]
model = module.Classifier("resnet18", 40, None)
for layer in model.modules():  # in eval mode whatever train() says
    if isinstance(layer, torch.nn.BatchNorm2d):
        layer.train(False)
        layer.train = lambda mode=True, layer=layer: layer
seen["before"] = {k: v.clone() for k, v in model.state_dict().items()}
wrapped = DistributedDataParallel(model) if world_size > 1 else model
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
args, cpu = Namespace(steps=4, batch_size=12), torch.device("cpu")
log = module.RunLog(args, cpu, enabled=False)
scaler = torch.GradScaler("cpu", enabled=False)
train(args, wrapped, cpu, loader, optimizer, scaler, log, None)
seen["after"] = model.state_dict()
torch.save(seen, f"{rank}.pt")
if world_size > 1:
    destroy()
