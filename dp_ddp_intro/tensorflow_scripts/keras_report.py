"""Devices, printed lines and results of the TensorFlow scripts.

The fields of a result are those of common/log.py, which cannot be imported here,
because it needs PyTorch and TensorFlow's environment has none.
"""

import json
import math
import os
import resource
import sys
import time
from pathlib import Path

import tensorflow as tf
from keras import callbacks

from common.errors import UserError

RESULTS = Path("logs/results.jsonl")


def get_devices(cores):
    """Return the names of all visible GPUs or, if there are none, of CPU cores."""
    if tf.config.list_physical_devices("GPU"):
        return [gpu.name for gpu in tf.config.list_logical_devices("GPU")]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(cores)]
    tf.config.set_logical_device_configuration(cpu, parts)
    return [f"CPU:{i}" for i in range(cores)]


class Report(callbacks.Callback):
    """Prints a line per epoch and adds a result to logs/results.jsonl at the end.

    args: the options, with the batch size per GPU; dataset: the batches. enabled:
    False for all workers but one.
    """

    def __init__(self, args, dataset, replicas, nodes=1, enabled=True):
        super().__init__()
        self.args, self.replicas, self.nodes = args, replicas, nodes
        self.enabled, self.steps = enabled, len(dataset)
        batch = args.batch_size * replicas
        if not self.steps:
            problem = f"{args.sequences} sequences do not fill a batch of {batch}"
            raise UserError(f"{problem}; use --sequences {batch}")
        self.tokens = self.steps * batch * args.length
        self.seconds, self.ends = [], []
        self.device, unit = "CPU core (TensorFlow)", "CPU core"
        for gpu in tf.config.list_physical_devices("GPU")[:1]:
            details = tf.config.experimental.get_device_details(gpu)
            self.device, unit = f"{details['device_name']} (TensorFlow)", "GPU"
        self.print(f"{Path(sys.argv[0]).stem} on {replicas} x {self.device}")
        total = f"{replicas} {unit}{'s' if replicas > 1 else ''} = {batch}"
        self.print(f"Batch size: {args.batch_size} per {unit} x {total}")

    def print(self, line):
        if self.enabled:
            print(line, flush=True)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_start = time.perf_counter()
        if epoch == 0:  # which takes half a minute on two cores
            self.print("TensorFlow builds its graph before the first step")

    def on_epoch_end(self, epoch, logs):
        """Print and keep an epoch's figures.

        epoch: counted from 0; logs: loss and accuracy (0 to 1) of the whole job.
        """
        loss, self.accuracy = logs["loss"], 100 * logs["accuracy"]
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss}: use a smaller --lr")
        seconds = time.perf_counter() - self.epoch_start
        self.seconds.append(seconds)
        self.ends.append(time.time())
        speed = f"{seconds:.1f} s, {self.tokens / seconds:.1f} tokens/s"
        metrics = f"train loss {loss:.4g} accuracy {self.accuracy:.4g} %"
        step = f"step milliseconds {1000 * seconds / self.steps:.4g}"
        self.print(f"Epoch {epoch + 1}: {speed}; {metrics}; {step}")

    def on_train_end(self, logs=None):
        if not self.enabled:
            return
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if tf.config.list_physical_devices("GPU"):
            memory = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2]
        result = {
            "script": sys.argv[0],
            "gpus": self.replicas,
            "nodes": self.nodes,
            "device": self.device,
            "cpu": cpu.partition("\n")[0],
            "cpus": os.cpu_count(),
            "tensorflow": tf.__version__,
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "options": vars(self.args),
            "unit": "tokens",
            "per_epoch": self.tokens,
            "epoch_seconds": self.seconds,  # the first one builds the graph
            "peak_memory_gb": memory / 1e9,
            "epoch_ends": self.ends,  # seconds since 1970
            "accuracy": self.accuracy,
            "training_seconds": sum(self.seconds),
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        self.print(f"Result added to {RESULTS}")
