"""Devices, log lines and results of the TensorFlow scripts; see common/log.py."""

import json
import math
import os
import resource
import statistics
import sys
import time
from pathlib import Path

import tensorflow as tf
from keras import callbacks

from common.errors import UserError

RESULTS = "logs/results.jsonl"


def get_devices(cores):
    """Return the names of all visible GPUs or, without any, of CPU cores.

    cores: how many CPU cores stand in for GPUs.
    """
    if tf.config.list_physical_devices("GPU"):
        return [gpu.name for gpu in tf.config.list_logical_devices("GPU")]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(cores)]
    tf.config.set_logical_device_configuration(cpu, parts)
    return [f"CPU:{i}" for i in range(cores)]


class Report(callbacks.Callback):
    """Prints one line per epoch and adds a result to logs/results.jsonl at the end.

    It shows the progress within an epoch: on a terminal in one line that changes, in
    a file by a line every 30 seconds. With enabled=False it prints and writes
    nothing, since only one of several workers reports.
    """

    def __init__(self, args, dataset, replicas, nodes=1, enabled=True):
        """args: the options; args.batch_size is per GPU; dataset: the batches."""
        super().__init__()
        self.enabled, self.steps = enabled, len(dataset)
        batch = args.batch_size * replicas
        self.tokens = self.steps * batch * args.length
        if not self.steps:
            raise UserError(
                f"{args.sequences} sequences do not fill a batch of {batch}; use "
                f"--sequences {batch}"
            )
        self.device, processor = "CPU core", "CPU core"
        for gpu in tf.config.list_physical_devices("GPU")[:1]:
            details = tf.config.experimental.get_device_details(gpu)
            self.device, processor = details["device_name"], "GPU"
        self.fields = {
            "script": sys.argv[0],
            "gpus": replicas,
            "nodes": nodes,
            "device": f"{self.device} (TensorFlow)",
            "cpus": os.cpu_count(),
            "tensorflow": tf.__version__,
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "options": vars(args),
            "unit": "tokens",
            "per_epoch": self.tokens,
        }
        self.print(
            f"{Path(sys.argv[0]).stem} on {replicas} x {self.fields['device']}"
        )
        total = f"{replicas} {processor}{'s' if replicas > 1 else ''} = {batch}"
        self.print(f"Batch size: {args.batch_size} per {processor} x {total}")
        self.seconds, self.ends, self.start = [], [], time.perf_counter()

    def print(self, line, end="\n"):
        if self.enabled:
            print(line, end=end, flush=True)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_start = self.last_printed = time.perf_counter()
        if epoch == 0:  # takes half a minute on two cores
            self.print("TensorFlow builds its graph before the first step")

    # Not on_train_batch_end(): Keras would wait for each step to fill its logs.
    def on_train_batch_begin(self, batch, logs=None):
        """batch: the number of this step in the epoch, from 0."""
        terminal, now = sys.stdout.isatty(), time.perf_counter()
        if now - self.last_printed > (0.2 if terminal else 30):
            self.last_printed = now
            speed = self.tokens * batch / self.steps / (now - self.epoch_start)
            line = f"Step {batch} of {self.steps}, {speed:.1f} tokens/s"
            self.print(line, end="\033[K\r" if terminal else "\n")

    def on_epoch_end(self, epoch, logs):
        """epoch: from 0; logs: loss and accuracy (0 to 1) of the whole job."""
        if not math.isfinite(logs["loss"]):
            raise UserError(f"the loss is {logs['loss']}: use a smaller --lr")
        self.seconds.append(time.perf_counter() - self.epoch_start)
        self.ends.append(time.time())
        seconds, self.accuracy = self.seconds[-1], 100 * logs["accuracy"]
        speed = f"{seconds:.1f} s, {self.tokens / seconds:.1f} tokens/s"
        trained = f"train loss {logs['loss']:.4g} accuracy {self.accuracy:.4g} %"
        step = f"step milliseconds {1000 * seconds / self.steps:.4g}"
        self.print(f"Epoch {epoch + 1}: {speed}; {trained}; {step}")

    def on_train_end(self, logs=None):
        if not self.enabled:
            return
        # Without the first epoch, which includes building the graph.
        seconds = statistics.median(self.seconds[1:] or self.seconds)
        if tf.config.list_physical_devices("GPU"):
            memory = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2]
        self.fields |= {
            "cpu": cpu.partition("\n")[0],
            "seconds_per_epoch": seconds,
            "peak_memory_gb": memory / 1e9,
            "epoch_ends": self.ends,  # seconds since 1970
            "finished": time.strftime("%FT%T%z"),
            "accuracy": self.accuracy,
            "training_seconds": time.perf_counter() - self.start,
        }
        os.makedirs("logs", exist_ok=True)
        with open(RESULTS, "a") as file:
            file.write(json.dumps(self.fields) + "\n")
        self.print(f"Result added to {RESULTS}")
