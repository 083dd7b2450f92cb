"""Save the records of PyTorch's flight recorder while a script runs; print them.

    sbatch run-2gpus.sh flight_recorder.py SCRIPT.py [OPTIONS]
    python flight_recorder.py

The first command saves the records every 5 s. The second prints the collectives that
each rank has not finished. Gloo needs this, because it writes no file when a
collective times out.
"""

import pickle
import reprlib
import runpy
import sys
import sysconfig
import threading
from pathlib import Path

from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed.distributed_c10d import _world

from common.device import get_ranks
from common.errors import UserError, run

FOLDER = Path("logs/flight_recorder")
# Parts of the paths of library code: Python's (some is "<frozen ...>") and ours.
LIBRARIES = "<", sysconfig.get_path("stdlib"), "-packages/", "/common/"


class DataUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dicts; pickle.loads() can run any code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it would import {module}.{name}")


def save(file, ended):
    """Write this rank's last collectives and their call stacks every 5 s."""
    while True:
        trace = pickle.loads(_dump_fr_trace(True, True, False))
        # torch 2.15 leaves out the names of Gloo's groups, and fr_trace needs them.
        trace["pg_config"] = {
            group.group_name: {"desc": group.group_desc, "ranks": str(list(ranks))}
            for group, ranks in _world.pg_group_ranks.items()
        }
        if ended.wait(5):  # at the end, a failed collective counts as finished
            return
        # Not in FOLDER, because the analyser reads all files there.
        part = FOLDER.with_name(f"{file.name}.part")
        part.write_bytes(pickle.dumps(trace))
        part.replace(file)


def is_script(file):
    """Return whether a file is code of the script, not of a library."""
    return not any(part in file for part in LIBRARIES)


def describe(entry):
    """Return a collective's number, name and shapes, and the script's line.

    The shapes are shortened: printing lists within lists may take for ever.
    """
    words = [str(int(entry["collective_seq_id"])), entry["profiling_name"]]
    words.append(reprlib.repr(entry["input_sizes"]))
    calls = [call for call in entry["frames"] if is_script(call["filename"])]
    for call in calls[:1]:
        words += ["at", call["filename"] + f":{int(call['line'])}"]
    return " ".join(words)


def print_unfinished():
    """Print each rank's unfinished collectives, and the script's lines."""
    if not FOLDER.is_dir():
        command = "sbatch run-2gpus.sh flight_recorder.py SCRIPT.py"
        raise UserError(f"no {FOLDER}/; run `{command}`")
    for file in sorted(FOLDER.iterdir()):
        with file.open("rb") as trace:
            try:
                entries = DataUnpickler(trace).load()["entries"]
                lines = [
                    describe(entry) for entry in entries if not entry["retired"]
                ]
            except Exception as error:  # damaged files raise many kinds
                text = f"{file} is not a trace ({type(error).__name__}: {error})"
                raise UserError(f"{text}; delete it") from None
        for line in lines:
            print(f"{file.name}: {line}")


def main():
    if len(sys.argv) == 1:
        return print_unfinished()
    if not Path(sys.argv[1]).is_file():
        raise UserError(f"no script {sys.argv[1]}; give the path of a file")
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"rank_{get_ranks()[0]}"
    ended = threading.Event()
    threading.Thread(target=save, args=[file, ended], daemon=True).start()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as python does
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        ended.set()


if __name__ == "__main__":
    run(main)
