"""Rehearses a lesson: runs all that its README submits, and says what that takes.

    make rehearse LESSON=exercise8 REHEARSE="--small --students 20"

The data must be there, and DATADIR say where, as for students. Where there is Slurm,
all is submitted at once. But a command that goes on from a checkpoint (--resume)
and the one before it, which wrote that, run alone. Without Slurm bash runs one after
the other; what they print is in logs/rehearsal-N.out of the lesson.

GPUs     that it asks for: of each node x nodes
GPU min  GPUs times minutes; without GPUs CPU min, the CPU time of its processes
exit     its exit status; above 128 a signal ended it. "as told" by the README: it
         ended with the status that this names beside the command
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from functools import cache
from pathlib import Path

from common.cli import OptionParser, at_least

REPOSITORY = Path(__file__).absolute().parent.parent
FENCE = r"^( *)(?:<!-- ([^\n]*) -->\n *)?```bash\n(.*?)\n *```$"
GPUS = r"gpu[^,(\s]*[:=](\d+)"  # --gres=gpu:2, --gpus-per-node=2, gpu:mi250:8(S:0-1)
ASKED = r"\$\(.*?\)"  # FROM=$(ls ...): what an earlier job left
LIVE = "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"
NEW = dict.fromkeys(("waited", "took", "cpu", "gpus", "nodes"), 0)
NEW |= {"state": "NOT STARTED", "exit": "", "log": None, "why": ""}


def output(*command, **more):
    """Return what a command prints; if it fails, why."""
    done = subprocess.run(command, capture_output=True, text=True, **more)
    return (done.stderr if done.returncode else done.stdout).strip()


@cache
def once(text, room):
    """Return what bash makes of $(...) where that stands for the first time."""
    return output("bash", "-c", f"echo {text}", cwd=room)


def read_jobs(readme, marks, small):
    """Return the jobs that it submits, and the names of those that are left out."""
    jobs, left_out, variables = [], [], {}
    for indent, mark, block in re.findall(FENCE, readme.read_text(), re.M | re.S):
        block = re.sub(f"^{indent}", "", block, flags=re.M)
        for line in re.sub(r"\\\n *", "", block).splitlines():
            typed, _, comment = line.partition(" #")
            text = re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), typed)
            name = " ".join(re.sub(r"\bsbatch |\$SMALL\b", "", typed).split())
            if given := re.fullmatch(r'(\w+)=("[^"]*"|\$\(.*\)) *', text):
                unset = given[1] == "SMALL" and not small
                variables[given[1]] = "" if unset else given[2].strip('"')
            elif not re.search(r"\bsbatch .*\.sh\b", text):
                continue
            elif mark not in marks or " LARGEST" in text:  # which the student finds
                left_out.append(f"{name} ({mark})")
            else:
                told = int((re.search(r"status (\d+)", comment) or [0, 0])[1])
                jobs.append({**NEW, "text": text, "name": name, "told": told})
    return jobs, left_out


def show(jobs, said=""):
    """Return how far it is, shown by a bar on a terminal, else by a line if new."""
    states = Counter(job["state"] for job in jobs)
    left = sum(states[state] for state in (*LIVE, NEW["state"]))
    text = ", ".join(f"{count} {state.lower()}" for state, count in states.items())
    if sys.stdout.isatty():
        bar = "#" * (20 - 20 * left // len(jobs))
        print(f"\r\33[K|{bar:20}| {text}", end="" if left else "\n", flush=True)
    elif text != said:
        print(f"{datetime.now():%H:%M:%S} {text}", flush=True)
    return text


def run(job, room, log):
    """Run a job by bash, as the README says for a machine without Slurm."""
    text = re.sub(rf"\bsbatch --\S*?{GPUS} ", r"GPUS=\1 bash ", job["text"])
    text = text.replace("sbatch ", "bash ")
    script = (room / re.search(r"\S+\.sh\b", text)[0]).read_text()
    gpus = re.search(r"\bGPUS=(\d+)", text) or re.search(GPUS, script)
    job["gpus"] = int((gpus or [0, 1])[1])
    job["nodes"] = int((re.search(r"--nodes=(\d+)", script) or [0, 1])[1])
    job["log"] = room / log
    before = os.times()
    text = f"exec < /dev/null &> {log}\n{text}"
    child = subprocess.Popen(["bash", "-c", text], cwd=room)
    try:
        child.wait()
    finally:  # after Ctrl-C, too: the terminal sends that to the child as well
        job["exit"], after = child.wait(), os.times()
        job["state"] = "FAILED" if job["exit"] else "COMPLETED"
        job["took"] = after.elapsed - before.elapsed
        job["cpu"] = sum(after[2:4]) - sum(before[2:4])  # the children's


def submit(job, room):
    """Submit a job to Slurm, which may refuse it."""
    text = job["text"].replace("sbatch ", "sbatch --parsable ", 1)
    answer = output("bash", "-c", text, cwd=room)
    if number := re.match(r"(\d+)(;|$)", answer):
        job |= {"id": number[1], "state": "PENDING"}
    else:
        job |= {"state": "REFUSED", "why": answer}


def ask(job):
    """Bring up to date what Slurm says of a job."""
    text = output("scontrol", "--oneliner", "show", "job", job["id"])
    slurm = dict(re.findall(r"(\S+?)=(.*?)(?= [\w:/]+=|$)", text))
    if "Invalid job id" in text:  # it ended minutes ago
        job |= {"state": "FORGOTTEN", "why": f"type sacct -j {job['id']}"}
    elif "JobState" in slurm:  # else Slurm's controller is busy
        job |= {"state": slurm["JobState"], "partition": slurm["Partition"]}
        job["log"] = Path(slurm.get("StdErr") or slurm["StdOut"])
    if slurm and job["state"] not in LIVE:
        times = (slurm[f"{event}Time"] for event in ("Submit", "Start", "End"))
        submitted, start, end = (datetime.fromisoformat(text) for text in times)
        gpus = re.search(GPUS, slurm.get("TresPerNode", "") + " gpu:0")
        code, number = map(int, slurm["ExitCode"].split(":"))
        job |= {"gpus": int(gpus[1]), "nodes": int(slurm["NumNodes"])}
        job["waited"] = (start - submitted).total_seconds()
        job["took"] = (end - start).total_seconds()
        job["exit"] = code or (number and 128 + number)


def wait(jobs):
    """Wait until all jobs that were submitted have ended."""
    pause, said = 1, show(jobs)
    while live := [job for job in jobs if "id" in job and job["state"] in LIVE]:
        time.sleep(pause)
        pause = min(10, 1.1 * pause)  # Slurm's controller is everybody's
        for job in live:
            ask(job)
        said = show(jobs, said)


def rehearse(jobs, room, slurm):
    """Run all jobs; after Ctrl-C end those that run, and start no other."""
    (room / "logs").mkdir(exist_ok=True)
    try:
        for n, job in enumerate(jobs):
            alone = any("--resume" in j["text"] for j in jobs[max(n - 1, 0) : n + 2])
            if slurm and alone:
                wait(jobs)
            job["text"] = re.sub(ASKED, lambda m: once(m[0], room), job["text"])
            if slurm:
                submit(job, room)
            else:
                job["state"] = "RUNNING"
                show(jobs)
                run(job, room, f"logs/rehearsal-{n + 1}.out")
        wait(jobs)
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C")
        live = [j["id"] for j in jobs if "id" in j and j["state"] in LIVE]
        if live:
            output("scancel", *live)
            print("Cancelled jobs", *live)
        wait(jobs)


def report(jobs, unit):
    """Print a row for each job, and what failed; return how many, and minutes."""
    form = "{:11} {:>6} {:>6} {:>5} {:>7} {:>4}  {}"
    head = "state", "waited", "took", "GPUs", unit, "exit", "command"
    print("", form.format(*head), sep="\n")
    failed, minutes = [], 0
    for job in jobs:
        well = job["state"] in ("COMPLETED", "FAILED") and job["exit"] == job["told"]
        cost = job["took"] * job["gpus"] * job["nodes"] / 60
        cost = cost if unit == "GPU min" else job["cpu"] / 60
        minutes += cost
        state = "as told" if well and job["told"] else job["state"].lower()
        cells = state, f"{job['waited']:.0f} s", f"{job['took']:.0f} s"
        gpus = f"{job['gpus']} x {job['nodes']}"
        print(form.format(*cells, gpus, f"{cost:.2f}", job["exit"], job["name"]))
        if not well:
            text = f"see {job['log']}" if job["log"] else job["why"]
            if job["log"] and job["log"].is_file():
                said = job["log"].read_text(errors="replace")
                text += ": " + "".join(re.findall("^(?!srun:).+", said, re.M)[-1:])
            failed.append(f"Failed: {job['name']}\n    {text or 'not started'}")
    took = f"{sum(job['took'] for job in jobs):.0f} s"
    print(form.format("together", "", took, "", f"{minutes:.2f}", "", ""))
    print(*failed, sep="\n", end="\n" * bool(failed))
    return len(failed), minutes


def main():
    lessons = {  # and where their run scripts are: beyond_ddp has none of its own
        str(file.parent.relative_to(REPOSITORY)): room
        for file in sorted(REPOSITORY.glob("[!.]*/**/README.md"))
        for room in (file.parent, file.parent.parent)
        if any(room.glob("*.sh")) and "\nsbatch " in file.read_text()
    }
    parser = OptionParser(__doc__)
    add, some = parser.add_argument, at_least(1)
    add("lesson", choices=lessons, metavar="LESSON", help=", ".join(lessons))
    add("--small", action="store_true", help="with the README's SMALL; default: no")
    add("--students", type=some, default=1, metavar="N", help="what N of them need")
    add("--gpus", type=some, metavar="N", help="they have; default: the partition's")
    text = "by bash, though Slurm is there; default: no"
    add("--no-slurm", action="store_true", help=text)
    args = parser.parse_args()
    folder, room = REPOSITORY / args.lesson, lessons[args.lesson]
    slurm = bool(shutil.which("sbatch")) and not args.no_slurm
    unit = (
        "GPU min"
        if slurm or glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/kfd")
        else "CPU min"
    )
    marks = ["", "takes long", *["needs Slurm"] * slurm]
    marks += ["needs a GPU"] * (unit == "GPU min" and not args.small)
    jobs, left_out = read_jobs(folder / "README.md", marks, args.small)
    texts = " ".join(job["text"] for job in jobs)
    scripts = [f.name for f in folder.glob("*.sh") if f.name not in texts]
    left_out += [f"{name} (no command has it)" for name in sorted(scripts)]
    rehearse(jobs, room, slurm)
    failed, minutes = report(jobs, unit)
    for name in left_out:
        print(f"Left out: {name}")
    if args.students > 1:
        many, gpus = args.students * minutes, args.gpus
        if slurm and not gpus:
            where = f"--partition={jobs[0].get('partition')}"
            nodes = output("sinfo", "--noheader", where, "--format=%D %G")
            found = re.findall(rf"^(\d+) .*?{GPUS}", nodes, re.M)
            gpus = sum(int(count) * int(each) for count, each in found)
        print(f"{args.students} students: {many:.0f} {unit}")
        if gpus:
            print(f"With {gpus} {unit[:3]}s: {many / gpus:.0f} min at least")
    print(f"{failed} of {len(jobs)} failed" if failed else "All ran well")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
