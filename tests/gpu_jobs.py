"""Scripts that `make test-gpu` runs side by side, each with a time limit."""

import json
import os
import re
import time

from fork_ranks import Run, run_script


class Failed(Exception):
    """A test that failed, with the reason in one line and what it has measured."""

    def __init__(self, reason, **row):
        super().__init__(reason)
        self.row = row


def explain(status, output):
    """Return in one line why a command failed: its first error, or its last line."""
    wrong = re.search(r"^(\[rank\d+\]: )?\S*Error.*|^  broken.*", output, re.M)
    return f"status {status}: {wrong[0] if wrong else last_line(output)}"


def last_line(output):
    return output.strip().rpartition("\n")[2][-200:]


def run_captured(folder, script, options, env, patch):
    """Run a script in the new process, with what C++ and NCCL print as well."""
    file = os.open(folder / f"{env.get('RANK', 0)}.c.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run_script(folder, script, options, env, patch)


class Job(Run):
    """A script that runs as one process (ranks=0), or with this number of ranks.

    with Job(folder, script, *options, ranks=2) as job:
        output = job.wait()
    """

    target = staticmethod(run_captured)

    def __init__(self, folder, script, *options, data=None, **how):
        """folder: a new one; script: its path within the repository.

        data: the folder with the data, if it is not DATADIR.
        """
        (folder / "logs").mkdir(parents=True)
        data = data or os.environ["DATADIR"]
        super().__init__(folder, data, script, *options, **how)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def output(self):
        """Return what all ranks have printed."""
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def wait(self, limit=300, expected=0):
        """Return the output; raise Failed after the limit or with another status."""
        end = time.monotonic() + limit
        while any(process.is_alive() for process in self.processes):
            if any(process.exitcode for process in self.processes):
                # The others may wait for ever for a rank that failed.
                end = min(end, time.monotonic() + 30)
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        statuses = [process.exitcode for process in self.processes]
        status = max(filter(None, statuses), default=0)
        if None in statuses and not status:
            raise Failed(f"timed out after {limit} s: {last_line(self.output())}")
        if status != expected:
            raise Failed(explain(status, self.output()))
        return self.output()

    def records(self):
        """Return what record() of record_script.py saved for each rank."""
        files = [self.folder / f"{rank}.json" for rank in range(len(self.processes))]
        return [json.loads(file.read_text()) for file in files]
