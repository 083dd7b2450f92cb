"""Every command of every README works as it is typed, in order, on a laptop.

Without a GPU and without Slurm, on a fresh copy of the repository. A block of them
is ```bash. What a laptop cannot do has a mark before it: <!-- needs a GPU -->.
With README_TIMES=FILE each command and its seconds are added to FILE; none may take
twice as long as the README says: 10 s, if it says nothing.
"""

import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import EXERCISES, REPOSITORY, copy_checkout

README = "README.md"
DOCS = sorted(str(f.relative_to(REPOSITORY)) for f in REPOSITORY.glob("docs/*.md"))
DOCS.append(f"bench/{README}")
BEYOND = f"dp_ddp_intro/beyond_ddp/{README}"
FILES = [README, *DOCS, *(f"{name}/{README}" for name in EXERCISES), BEYOND]
MARKS = {
    "needs a GPU",
    "needs Slurm",
    "needs a network",
    "needs an account",
    "needs another machine",
    "runs until you end it",
    "takes long",
}
FENCE = re.compile(
    r"^( *)(?:<!-- ([^\n]*) -->\n *)?```bash\n(.*?)\n *```$", re.M | re.S
)
SHORTER = {
    "--sequences 2048 --epochs 3": "--sequences 128",
    "--sequences 256": "--sequences 128",
}
COMMAND = re.compile(
    r"^    +(cd|source|python \S+py|sbatch|bash|export|make|sudo|ssh|srun)\b", re.M
)


def blocks(file):
    """Return (mark or None, [commands]) of each block."""
    found = []
    for indent, mark, body in FENCE.findall((REPOSITORY / file).read_text()):
        body = re.sub(f"^{indent}", "", body, flags=re.M)
        commands = re.split(r"(?<!\\)\n", body)
        found.append((mark or None, [c for c in commands if c.strip()]))
    return found


def without_slurm(command):
    """Return what the README says to type in its place."""
    option = r"\bsbatch --(?:gpus-per-node=|gres=gpu:)(\d+) "
    command = re.sub(option, r"GPUS=\1 bash ", command)
    return re.sub(r"\bsbatch ", "bash ", command)


def said_seconds(command):
    """Return how long the comment beside a command says that it takes."""
    found = re.search(r"# (\d+) s\b", command)
    return int(found[1]) if found else 10


@pytest.mark.parametrize("file", FILES)
def test_commands_are_marked(file):
    found = blocks(file)
    assert found and {mark for mark, _ in found} <= {None, *MARKS}
    text = (REPOSITORY / file).read_text()
    assert text.count("```bash") == len(found)
    assert not COMMAND.search(FENCE.sub("", text))
    for _, commands in found:
        done = subprocess.run(["bash", "-n"], input="\n".join(commands), text=True)
        assert done.returncode == 0, commands
    typed = [c for mark, commands in found if mark is None for c in commands]
    assert not [c for c in typed if "JOBID" in c or "--nodes=" in c]
    assert typed or file in DOCS
    if "/README" in file and file not in DOCS and "clinic" not in file:  # is small
        runs = [c for c in typed if "sbatch" in c and "check.py" not in c]
        small = ["$SMALL"]  # and what is made of it
        small += ["$" + c.split("=")[0] for c in typed if '="$SMALL ' in c]
        assert runs and not [c for c in runs if not any(s in c for s in small)]


def anchors(text):
    heads = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("file", ["*.md", "*/*.md", "*/*/*.md"])
def test_links_lead_somewhere(file):
    for page in REPOSITORY.glob(file):
        text = FENCE.sub("", page.read_text())
        found = re.findall(r"\]\(([^)\s]+)\)|^\[\w+\]: (\S+)", text, re.M)
        for link in {
            a or b for a, b in found if not (a or b).startswith("https://")
        }:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target.read_text()), (
                f"{page}: {link}"
            )


@pytest.fixture
def copy(tmp_path):
    """A fresh copy of the repository, with the Python environments of this one."""
    return copy_checkout(tmp_path / "repository")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", [f for f in FILES if f not in DOCS])
def test_commands_work_as_typed(file, copy, sample, tmp_path):
    """With README_TIMES=FILE as a reader types them, and timed; else shorter."""
    if not (REPOSITORY / ".venv-tensorflow").exists() and "intro" in file:
        pytest.skip("no TensorFlow: make venv-tensorflow")
    typed = [c for mark, commands in blocks(file) if not mark for c in commands]
    script, times = "", tmp_path / "times"
    brief = "README_TIMES" not in os.environ
    if brief:  # what sample_data.py would draw is there, a tenth of it
        shutil.copytree(sample, copy / "data/sample", dirs_exist_ok=True)
        shutil.rmtree(
            copy / "data/sample/CINIC"
        )  # its runs are stopped in the middle
    # CINIC's first run is stopped while it trains, and so needs all its epochs.
    first = "sbatch run.sh cinic.py $SMALL --resume" if "cinic" in file else "SMALL="
    for number, command in enumerate(typed):
        text = without_slurm(command)
        for long, short in SHORTER.items() if brief else ():
            text = text.replace(long, short)
        if brief and "$SMALLER" in text:  # the longest by far: a tenth for it, too
            text = f'DATADIR="{sample}" {text}'
        script += f"start=$EPOCHREALTIME\n{text}\n"
        script += f'echo {number} $PIPESTATUS $start $EPOCHREALTIME >> "{times}"\n'
        if brief and command.startswith(first):
            less = " --sequences 128" if "intro" in file else ""
            script += f'SMALL+=" --epochs 1{less}"\n'
    env = {
        k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TERM", "USER")
    }
    env |= {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"}
    with open(tmp_path / "output", "w") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        # Interactive, as the reader's shell is: in it env.sh defines python.
        bash = ["bash", "-ic", script]
        subprocess.run(bash, cwd=copy, env=env, timeout=3000, **streams)
    rows = [line.split() for line in times.read_text().splitlines()]
    shown = (tmp_path / "output").read_text()[-3000:]
    assert len(rows) == len(typed), shown
    results = []
    for (_, status, start, end), command in zip(rows, typed, strict=True):
        results.append([file, command, int(status), float(end) - float(start)])
        usual = ["0", "1"] if command.startswith("diff ") else ["0"]
        said = re.findall(r"# .*status (\d+)", command)
        assert status in (said or usual), (command, shown)
    if not brief:
        with open(os.environ["README_TIMES"], "a") as lines:
            lines.writelines(json.dumps(result) + "\n" for result in results)
        late = [r for r in results if r[3] > 2 * said_seconds(r[1])]
        assert not late
