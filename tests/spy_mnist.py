"""Runs an MNIST script's main(), and saves to RANK.pt what each rank saw.

train() only notes which images it was given, and leaves the weights alone.
"""

import os
import sys
from pathlib import Path

import torch

script, *options = sys.argv[1:]
sys.argv = [script, *options]
sys.path.insert(0, str(Path(script).resolve().parent))
module = __import__(Path(script).stem)
seen = {"orders": [], "random": [], "tested": []}


def dry_train(args, model, device, train_loader, optimizer, epoch, log):
    seen["orders"].append(list(train_loader.sampler))
    seen["random"].append(torch.rand(1).item())


def noting_test(model, device, test_loader):
    result = test(model, device, test_loader)
    seen["tested"].append(
        (list(getattr(test_loader.dataset, "indices", [])), result)
    )
    return result


test, module.test, module.train = module.test, noting_test, dry_train
module.RunLog.bar = lambda log, loader: loader
module.main()
torch.save(seen, f"{os.environ.get('RANK', 0)}.pt")
