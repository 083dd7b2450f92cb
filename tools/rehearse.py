"""Rehearsal of a lesson: submits all jobs of its README, and prints what they take.

    make rehearse LESSON=exercise8 REHEARSE="--students 20"

Set DATADIR to the data. Every job waits for the one before it, because some resume
its checkpoint. Ctrl-C cancels the running job. The GPUs are those of all nodes.
"expected" means that the job ended with the status that the README gives for the
command.
"""

import argparse
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from common.errors import UserError
from common.errors import run as run_main

REPOSITORY = Path(__file__).absolute().parent.parent
NAME = f"rehearsal-{os.getpid()}"  # of all jobs
FENCE = r"^( *)(?:<!-- ([^\n]*) -->\n *)?```bash\n(.*?)\n *```$"
MARKS = "", "takes long", "needs Slurm", "needs a GPU"  # of blocks to submit
GPUS = r"gpu[^,(\s]*[:=](\d+)"  # gres:gpu:2, gres/gpu:a100=4, gres:gpu:mi250:8
# State, times of submission, start and end, nodes, GPUs of each, reason
SQUEUE = "squeue --noheader --states=all --format='%T|%V|%S|%e|%D|%b|%r' --jobs="
UNKNOWN = ["", "", "", "0", ""]  # of a job that squeue does not list
ROW = "{:11} {:>6} {:>6} {:>4} {:>7} {:>4}  {}"


def read_lines(readme):
    """Return the lines that set a variable, copy or submit, and those skipped."""
    lines, skipped = [], []
    for indent, mark, block in re.findall(FENCE, readme.read_text(), re.M | re.S):
        block = re.sub(f"^{indent}", "", block, flags=re.M)
        for line in re.sub(r"\\\n *", "", block).splitlines():
            submits = re.search(r"\bsbatch .*\.sh\b", line)
            if submits and (mark not in MARKS or " LARGEST" in line):
                skipped.append(line)  # students find the largest batch
            elif submits or re.match(r'\w+=("|\$\()|cp \w+\.py', line):
                lines.append(line)
    return lines, skipped


def run(command, exercise, env):
    """Run a command in bash; return its status and output."""
    options = {"cwd": exercise, "env": env, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", command], **options)
    return done.returncode, (done.stdout + done.stderr).strip()


def run_job(line, exercise, env):
    """Submit a job and wait for it; return its status, squeue's fields, its log."""
    status, answer = run(line, exercise, env)
    number = re.search(r"Submitted batch job (\d+)", answer)
    if not number:
        return status, ["REFUSED", *UNKNOWN, answer], Path()
    _, found = run(SQUEUE + number[1], exercise, env)
    fields = found.split("|") if "|" in found else ["FORGOTTEN", *UNKNOWN, found]
    return status, fields, exercise / f"slurm-{number[1]}.out"


def print_row(line, status, fields, log):
    """Print the row of a job; return its GPU minutes, and whether it failed."""
    command, _, comment = line.partition(" #")
    command = " ".join(command.replace("sbatch ", "").split())
    expected = re.findall(r"\d+", comment.partition("status")[2]) or ["0"]
    state, *times, nodes, gpus, why = fields
    state, waited, took = state.lower(), 0, 0
    gpus = int(nodes) * sum(map(int, re.findall(GPUS, gpus)))
    if "T" in times[1]:  # else it never started
        sent, start, end = (datetime.fromisoformat(t).timestamp() for t in times)
        waited, took = start - sent, end - start
    minutes = took * gpus / 60
    ok = state in ("completed", "failed") and str(status) in expected
    if ok and status:
        state = "expected"
    cells = state, f"{waited:.0f} s", f"{took:.0f} s", gpus, f"{minutes:.2f}"
    print(ROW.format(*cells, status, command), flush=True)
    if log.is_file():
        printed = re.findall("^(?!srun:).+", log.read_text(errors="replace"), re.M)
        why = f"see {log}: {''.join(printed[-1:])}"
    if not ok:
        print(f"    {why}")
    return minutes, not ok


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lesson", metavar="LESSON", help="folder, such as exercise8")
    parser.add_argument("--students", type=int, default=1, help="number of students")
    args = parser.parse_args()
    folder, failed, total = REPOSITORY / args.lesson, 0, 0
    status, answer = run("timeout 15 sinfo", None, None)
    if status:
        reason = " ".join(answer.split())  # sinfo may print several lines
        raise UserError(
            f"Slurm does not answer ({reason}); run this where `sinfo` works"
        )
    lines, skipped = read_lines(folder / "README.md")
    env = {**os.environ, "SBATCH_WAIT": "1", "SBATCH_JOB_NAME": NAME}
    print(ROW.format("state", "waited", "took", "GPUs", "GPU min", "exit", "job"))
    try:
        for line in lines:
            if "sbatch " in line:
                minutes, bad = print_row(line, *run_job(line, folder, env))
                total, failed = total + minutes, failed + bad
            elif line.startswith("cp "):
                run(line.replace("cp", "cp -n", 1), folder, env)  # keeps yours
            else:
                variable = line.partition("=")[0]
                _, env[variable] = run(f'{line}; echo "${variable}"', folder, env)
    finally:
        run(f"scancel --name={NAME}", folder, env)
    for line in skipped:
        print(f"Skipped: {line}")
    print(f"{args.students} students: {args.students * total:.0f} GPU min")
    print(f"{failed} failed" if failed else "All jobs ran as expected")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_main(main)
