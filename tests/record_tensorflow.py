"""Runs a script of tensorflow_scripts/, and saves each epoch's loss to OUT.

python record_tensorflow.py OUT SCRIPT [OPTIONS]
"""

import json
import os
import sys
from pathlib import Path

out, script, *options = sys.argv[1:]
sys.argv = [script, *options]
sys.path.insert(0, str(Path(script).resolve().parent))
if os.environ.get("SGD"):  # its steps tell a sum of gradients from their mean
    optimizers = __import__("keras_model").optimizers
    optimizers.Adam = optimizers.SGD
Report = __import__("keras_report").Report
losses, on_epoch_end = [], Report.on_epoch_end


def record_losses(self, epoch, logs):
    losses.append(float(logs["loss"]))
    on_epoch_end(self, epoch, logs)


Report.on_epoch_end = record_losses
__import__("common.errors").errors.run(__import__(Path(script).stem).main)
number = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))
Path(f"{out}.{number['task']['index']}").write_text(json.dumps(losses))
