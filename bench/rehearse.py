"""Rehearses a lesson: runs all that its README submits, and says what that takes.

    make rehearse LESSON=exercise8 REHEARSE="--small --students 20"

DATADIR says where the data are. Slurm gets all at once, but what goes on from a
checkpoint (--resume) and the command before it, which wrote that, run alone. Without
Slurm bash runs one by one; what they print is in logs/rehearsal-N.out of the lesson.

GPUs     that it asks for: of each node x nodes
GPU min  GPUs times minutes; without GPUs CPU min, the CPU time of its processes
exit     its status; above 128 a signal ended it. "as told": by the README, beside it
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path

from common.cli import OptionParser, UserError, at_least

REPOSITORY = Path(__file__).absolute().parent.parent
FENCE = r"^( *)(?:<!-- ([^\n]*) -->\n *)?```bash\n(.*?)\n *```$"
GPUS = r"gpu[^,(\s]*[:=](\d+)"  # --gres=gpu:2, --gpus-per-node=2, gpu:mi250:8(S:0-1)
ENDED = "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"
ENDED += "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT", "FORGOTTEN", "REFUSED"
FOUND = "with the batch that the student finds"
AWAY = "down|drain|err|fail|inval|maint|unk"  # nodes; idle* does not answer, either
NEW = dict.fromkeys(("waited", "took", "cpu", "gpus", "nodes", "live"), 0)
NEW |= {"state": "NOT STARTED", "exit": "", "log": None, "why": "", "note": ""}


def output(*command, **more):
    """Return what a command prints; if it fails, why."""
    done = subprocess.run(command, capture_output=True, text=True, **more)
    return (done.stderr if done.returncode else done.stdout).strip()


def read_jobs(readme, marks, small):
    """Return the jobs that it submits, and the names of those that are left out."""
    jobs, left_out, variables = [], [], {}
    for indent, mark, block in re.findall(FENCE, readme.read_text(), re.M | re.S):
        block = re.sub(f"^{indent}", "", block, flags=re.M)
        for line in re.sub(r"\\\n *", "", block).splitlines():
            typed, _, told = line.partition(" #")
            text = re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), typed)
            name = " ".join(re.sub(r"\bsbatch |\$SMALL\b", "", typed).split())
            if given := re.fullmatch(r'(\w+)=("[^"]*"|\$\(.*\)) *', text):
                value = "" if given[1] == "SMALL" and not small else given[2]
                variables[given[1]] = value.strip('"')
            elif not re.search(r"\bsbatch .*\.sh\b", text):
                continue
            elif (why := FOUND if " LARGEST" in text else mark) not in marks:
                left_out.append(f"{name} ({why})")
            else:
                told = set(map(int, re.findall(r"\d+", told.partition("status")[2])))
                jobs.append({**NEW, "text": text, "name": name, "told": told or {0}})
    return jobs, left_out


def show(jobs, said=""):
    """Return how far it is, shown by a bar on a terminal, else by a line if new."""
    states = Counter(job["state"].lower() + job["note"] for job in jobs)
    left = sum(job["state"] not in ENDED for job in jobs)
    text = ", ".join(f"{count} {state}" for state, count in states.items())
    if sys.stdout.isatty():
        bar = "#" * (20 - 20 * left // len(jobs))
        print(f"\r\33[K|{bar:20}| {text}", end="" if left else "\n", flush=True)
    elif text != said:
        print(f"{datetime.now():%H:%M:%S} {text}", flush=True)
    return text


def run(job, jobs, room):
    """Run a job by bash, as the README says for a machine without Slurm."""
    job["state"], log = "RUNNING", f"logs/rehearsal-{jobs.index(job) + 1}.out"
    show(jobs)
    text = re.sub(rf"\bsbatch --\S*?{GPUS} ", r"GPUS=\1 bash ", job["text"])
    text = f"exec < /dev/null &> {log}\n" + text.replace("sbatch ", "bash ")
    script = (room / re.search(r"\S+\.sh\b", text)[0]).read_text()
    gpus = re.findall(r"\bGPUS=(\d+)", text) or re.findall(GPUS, script) or [1]
    nodes = re.findall(r"--nodes=(\d+)", script) or [1]
    job |= {"gpus": int(gpus[0]), "nodes": int(nodes[0]), "log": room / log}
    before = os.times()
    child = subprocess.Popen(["bash", "-c", text], cwd=room)
    try:
        child.wait()
    finally:  # after Ctrl-C, too: the terminal sends that to the child as well
        job["exit"], after = child.wait(), os.times()
        job["state"] = "FAILED" if job["exit"] else "COMPLETED"
        job["took"] = after.elapsed - before.elapsed
        job["cpu"] = sum(after[2:4]) - sum(before[2:4])  # the children's


def submit(job, jobs, room):
    """Submit a job to Slurm: if it takes no more of ours, when one has ended."""
    answer = output("bash", "-c", job["text"], cwd=room)
    live = sum(job["live"] for job in jobs)
    if number := re.search(r"Submitted batch job (\d+)", answer):
        job |= {"id": number[1], "state": "PENDING", "live": 1, "heard": time.time()}
    elif live and re.search("MaxSubmit|accounting/QOS policy", answer):
        wait(jobs, live - 1)
        submit(job, jobs, room)
    else:
        job |= {"state": "REFUSED", "why": answer}


def ask(job):
    """Bring up to date what Slurm says of a job."""
    text = output("scontrol", "--oneliner", "show", "job", job["id"])
    slurm = dict(re.findall(r"(\S+?)=(.*?)(?= [\w:/]+=|$)", text))
    job["note"] = f" ({slurm.get('Reason', text)})".replace(" (None)", "")
    if "JobState" in slurm:  # else its controller may be busy
        job |= {"state": slurm["JobState"], "partition": slurm["Partition"]}
        job["log"] = Path(slurm.get("StdErr") or slurm["StdOut"])
        job["heard"] = time.time()
    elif "Invalid job id" in text or time.time() > job["heard"] + 600:
        job |= {"state": "FORGOTTEN", "why": f"type sacct -j {job['id']}"}
    job["live"] = job["state"] not in ENDED
    if slurm.get("JobState") in ENDED:
        job |= {"note": "", "why": f"no log; Slurm's reason: {slurm['Reason']}"}
        code, number = map(int, slurm["ExitCode"].split(":"))
        job["exit"] = code or (number and 128 + number)
        job["gpus"] = sum(map(int, re.findall(GPUS, slurm.get("TresPerNode", ""))))
        job["nodes"] = int(slurm["NumNodes"])
        times = [slurm[f"{event}Time"] for event in ("Submit", "Start", "End")]
        if "Unknown" not in times:
            sent, start, end = (datetime.fromisoformat(t).timestamp() for t in times)
            job |= {"waited": start - sent, "took": end - start}


def wait(jobs, most=0):
    """Wait until at most so many of the jobs that were submitted have not ended."""
    pause, said = 1, show(jobs)
    while len(live := [job for job in jobs if job["live"]]) > most:
        if signal.sigtimedwait({signal.SIGINT}, pause):
            raise KeyboardInterrupt
        pause = min(10, 1.1 * pause)  # Slurm's controller is everybody's
        for job in live:
            ask(job)
        said = show(jobs, said)


def rehearse(jobs, room, slurm):
    """Run all jobs; after Ctrl-C end those that run, and start no other."""
    (room / "logs").mkdir(exist_ok=True)
    if slurm:  # only wait() heeds Ctrl-C: else sbatch may make a job that none ends
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # FROM=$(ls ...) is the same for later commands, though there may be a newer one.
    asked = cache(lambda text: output("bash", "-c", f"echo {text}", cwd=room))
    try:
        for n, job in enumerate(jobs):
            # The next command goes on from the newest checkpoint of the folder.
            alone = any("--resume" in j["text"] for j in jobs[max(n - 1, 0) : n + 2])
            if slurm and alone:
                wait(jobs)
            job["text"] = re.sub(r"\$\(.*?\)", lambda m: asked(m[0]), job["text"])
            (submit if slurm else run)(job, jobs, room)
        wait(jobs)
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C")
        if live := [job["id"] for job in jobs if job["live"]]:
            output("scancel", *live)
            print("Cancelled jobs", *live)
        with suppress(KeyboardInterrupt):  # a second one ends the wait
            wait(jobs)


def report(jobs, unit):
    """Print a row for each job, and what failed; return how many, and minutes."""
    form = "{:11} {:>6} {:>6} {:>5} {:>7} {:>4}  {}"
    head = "state", "waited", "took", "GPUs", unit, "exit", "command"
    print("", form.format(*head), sep="\n")
    failed, minutes = [], 0
    for job in jobs:
        well = job["state"] in ("COMPLETED", "FAILED") and job["exit"] in job["told"]
        cost = job["took"] * job["gpus"] * job["nodes"] / 60
        cost = cost if unit == "GPU min" else job["cpu"] / 60
        minutes += cost
        state = "as told" if well and job["exit"] else job["state"].lower()
        cells = state, f"{job['waited']:.0f} s", f"{job['took']:.0f} s"
        gpus = f"{job['gpus']} x {job['nodes']}"
        print(form.format(*cells, gpus, f"{cost:.2f}", job["exit"], job["name"]))
        if not well:
            text, log = job["why"], job["log"]
            if log and log.is_file():
                said = log.read_text(errors="replace")
                said = re.findall("^(?!srun:).+", said, re.M)[-1:]
                text = f"see {log}: {''.join(said)}"
            failed.append(f"Failed: {job['name']}\n    {text or 'not started'}")
    took = f"{sum(job['took'] for job in jobs):.0f} s"
    print(form.format("together", "", took, "", f"{minutes:.2f}", "", ""))
    print(*failed, sep="\n", end="\n" * bool(failed))
    return len(failed), minutes


def main():
    lessons = {  # and where run scripts are: above it, unless it has some of its own
        str(file.parent.relative_to(REPOSITORY)): room
        for folder in ("[!.]*", "[!.]*/*")  # data/ has 100,000 files further down
        for file in sorted(REPOSITORY.glob(f"{folder}/README.md"))
        for room in (file.parent.parent, file.parent)
        if any(room.glob("*.sh")) and "\nsbatch " in file.read_text()
    }
    parser = OptionParser(__doc__)
    add, some = parser.add_argument, at_least(1)
    add("lesson", choices=lessons, metavar="LESSON", help=", ".join(lessons))
    add("--small", action="store_true", help="with the README's SMALL; default: no")
    add("--students", type=some, default=1, metavar="N", help="what N of them need")
    add("--gpus", type=some, metavar="N", help="they have; default: the partition's")
    add("--no-slurm", action="store_true", help="run by bash instead; default: no")
    args = parser.parse_args()
    folder, room = REPOSITORY / args.lesson, lessons[args.lesson]
    slurm = bool(shutil.which("sbatch")) and not args.no_slurm
    gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    unit = "GPU min" if slurm or gpu else "CPU min"
    marks = ["", "takes long", *["needs Slurm"] * slurm]
    marks += ["needs a GPU"] * (unit == "GPU min" and not args.small)
    jobs, left_out = read_jobs(folder / "README.md", marks, args.small)
    scripts = [f.name for f in folder.glob("*.sh") if f.name not in str(jobs)]
    left_out += [f"{name} (no command has it)" for name in sorted(scripts)]
    if not jobs:
        raise UserError(f"nothing to submit; left out: {', '.join(left_out)}")
    rehearse(jobs, room, slurm)
    failed, minutes = report(jobs, unit)
    print(*(f"Left out: {name}\n" for name in left_out), sep="", end="")
    if args.students > 1:
        many, gpus = args.students * minutes, args.gpus
        if slurm and not gpus:
            where = ",".join({j["partition"] for j in jobs if "partition" in j})
            nodes = output("sinfo", "-h", "-p", where, "--format=%T %D %G")
            found = re.findall(rf"^(?!{AWAY})[^ *]+ (\d+) (.*)", nodes, re.M)
            gpus = sum(int(n) * sum(map(int, re.findall(GPUS, g))) for n, g in found)
        least = ["at least"] if failed else []  # what was refused has cost nothing
        print(args.students, "students:", *least, f"{many:.0f} {unit}")
        if gpus:
            print(f"With {gpus} {unit[:3]}s: {many / gpus:.0f} min at least")
    print(f"{failed} of {len(jobs)} failed" if failed else "All ran well")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
