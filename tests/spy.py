"""Runs a script's main() as `python SCRIPT` would, and saves what each rank saw.

    torchrun ... spy.py OUT dry|real SCRIPT [OPTIONS]

dry: train() only notes which images it was given, and leaves the weights alone.
"""

import os
import sys
from pathlib import Path

import torch

out, mode, script, *options = sys.argv[1:]
sys.argv = [script, *options]
sys.path.insert(0, str(Path(script).resolve().parent))
module = __import__(Path(script).stem)
seen = {"orders": [], "random": [], "evaluated": [], "models": []}


class Classifier(module.Classifier):
    def __init__(self, *args):
        super().__init__(*args)
        seen["models"].append(self)
        seen["before"] = {
            k: v.clone() for k, v in self.features.state_dict().items()
        }


def dry_train(model, loader, optimizer, device):
    seen["orders"].append(list(loader.sampler))
    seen["random"].append(torch.rand(1).item())
    return {"loss": 0.0, "accuracy": 0.0}


def noting_evaluate(model, loader, device):
    result = evaluate(model, loader, device)
    seen["evaluated"].append((list(getattr(loader.dataset, "indices", [])), result))
    return result


module.Classifier, evaluate = Classifier, module.evaluate
module.evaluate = noting_evaluate
if mode == "dry":
    module.train = dry_train
module.RunLog.bar = lambda log, loader: loader
module.main()
seen["after"] = seen.pop("models")[0].state_dict()
torch.save(seen, f"{out}/{os.environ.get('RANK', 0)}.pt")
