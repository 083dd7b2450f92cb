"""Every command of every README works as it is typed, in order, on a laptop.

Without a GPU and without Slurm, on a fresh copy of the repository. A block of them
is ```bash. What a laptop cannot do has a mark before it: <!-- needs a GPU -->.
"""

import os
import re
import shutil
import subprocess

import pytest
from conftest import (
    EXERCISES,
    REPOSITORY,
    call,
    copy_checkout,
    load,
    path_without_sbatch,
)

README = "README.md"
DOCS = sorted(str(f.relative_to(REPOSITORY)) for f in REPOSITORY.glob("docs/*.md"))
DOCS = [
    f for f in DOCS if "GLOSSARY" not in f and "QUESTIONS" not in f
]  # no commands
DOCS += [f"{folder}/{README}" for folder in ("bench", "tools", "tools/predict")]
TOOLS = "docs/SPEEDUP.md", "tools/README.md", "tools/predict/README.md"
PAGES = [
    str(page.relative_to(REPOSITORY))
    for folder in EXERCISES
    for page in sorted(REPOSITORY.glob(f"{folder}/*.md"))
    if page.name not in ("ANSWERS.md", "ROWS.md")
]
FILES = [README, *DOCS, *PAGES]
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


@pytest.mark.parametrize("file", FILES)
def test_commands_are_marked(file):
    found = blocks(file)
    assert found and {mark for mark, _ in found} <= {None, *MARKS}
    text = (REPOSITORY / file).read_text()
    assert text.count("```bash") == len(found)
    assert not COMMAND.search(FENCE.sub("", text))
    if file in PAGES:  # a lesson's first command says from where
        before = " ".join(text.split("\n```bash\ncd ")[0].split())
        assert before.endswith("In the repository's root:")
    for _, commands in found:
        done = subprocess.run(["bash", "-n"], input="\n".join(commands), text=True)
        assert done.returncode == 0, commands
    typed = [c for mark, commands in found if mark is None for c in commands]
    assert not [c for c in typed if "JOBID" in c or "--nodes=" in c]
    assert typed or file in DOCS


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", [README, *TOOLS, *PAGES])
def test_commands_work_as_typed(file, sample, tmp_path):
    """In one shell, but with less data and fewer epochs than a reader has."""
    if not (REPOSITORY / ".venv-tensorflow").exists() and "intro" in file:
        pytest.skip("no TensorFlow: make venv-tensorflow")
    copy = copy_checkout(tmp_path / "repository")
    # What sample_data.py would make, a tenth of it. CINIC's first runs are stopped
    # within an epoch, and take it all.
    if file not in TOOLS:  # their model's data is random
        keep = shutil.ignore_patterns("CINIC")
        shutil.copytree(
            sample, copy / "data/sample", dirs_exist_ok=True, ignore=keep
        )
    # CINIC's first run is stopped while it trains, and so needs all its epochs.
    first = "sbatch run.sh cinic.py --resume" if "cinic" in file else None
    random_data = file.startswith(("dp_ddp_intro", "beyond_ddp", "docs/", "tools/"))
    less = "--epochs 1" + " --sequences 128" * random_data
    if "cifar" in file:  # a trace takes eight steps
        less += " --batch-size 8"
    for small in [] if first else copy.glob("*/small.txt"):
        small.write_text(f"{small.read_text().strip()} {less}\n")
    typed = [c for mark, commands in blocks(file) if not mark for c in commands]
    script, statuses = "", tmp_path / "statuses"
    for command in typed:
        text = command
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        script += f'{text}\necho $PIPESTATUS >> "{statuses}"\n'
        if first and command.startswith(first):
            script += f'echo "$(< small.txt) {less}" > small.txt\n'
            script += f'cp "{sample}"/CINIC/* "$DATADIR"/CINIC/\n'
    names = "LANG", "TERM", "USER"
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"}
    env["PATH"] = path_without_sbatch(tmp_path / "bin")
    with open(tmp_path / "output", "w") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        # Interactive, as the reader's shell is: env.sh adds python and sbatch there.
        bash = ["bash", "-ic", script]
        subprocess.run(bash, cwd=copy, env=env, timeout=3000, **streams)
    shown = (tmp_path / "output").read_text()[-3000:]
    found = statuses.read_text().split()
    assert len(found) == len(typed), shown
    for status, command in zip(found, typed, strict=True):
        usual = ["0", "1"] if command.startswith("diff ") else ["0"]
        expected = re.findall(r"# .*status (\d+)", command)
        assert status in (expected or usual), (command, shown)


@pytest.mark.parametrize("file", FILES)
def test_quoted_lines_have_their_numbers(file):
    """As in `at patient7.py:70 output = model(`."""
    text = " ".join((REPOSITORY / file).read_text().split())
    for name, number, code in re.findall(r"at (\w+\.py):(\d+) ([\w.]+\()", text):
        (script,) = REPOSITORY.glob(f"*/{name}")
        line = script.read_text().splitlines()[int(number) - 1]
        assert line.strip().startswith(code), f"{name}:{number}"


def options_in_texts():
    """Return {script: {(option, text that names it)}} of the lessons' scripts."""
    found = {}
    for page in sorted(REPOSITORY.glob("[a-z]*/*.md")):
        for name, words in re.findall(
            r"(\w+\.py)((?: +[^\s`|&;)#]+)+)", page.read_text()
        ):
            scripts = {*REPOSITORY.glob(f"{page.parent.name}/{name}")}
            scripts |= {s for e in EXERCISES for s in REPOSITORY.glob(f"{e}/{name}")}
            for option in re.findall(r" (--[a-z][a-z0-9-]+)", words):
                for script in scripts:
                    found.setdefault(script, set()).add((option, page.name))
    return found


@pytest.mark.parametrize("exercise", EXERCISES)
def test_options_in_texts_exist(exercise, capsys):
    """As in `cinic.py --batch-size 64`."""
    scripts = {
        s: o for s, o in options_in_texts().items() if s.parent.name == exercise
    }
    assert scripts or exercise == "clinic"
    for script, options in scripts.items():
        with pytest.raises(SystemExit):
            call(load(exercise, script.stem), "--help")
        known = {*re.findall(r"--[a-z0-9-]+", capsys.readouterr().out)}
        assert not [o for o in options if o[0] not in known], script.name


def table_rows(text):
    """Return the cells of each row of the tables in a text."""
    rows = re.findall(r"^\|(.*)\|$", text, re.M)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def test_the_plans_of_teaching_add_up():
    text = (REPOSITORY / "docs/TEACHING.md").read_text()
    plans = re.findall(r"^### (\d+) minutes.*?(?=^##)", text, re.M | re.S)
    bodies = re.split(r"^###? ", text, flags=re.M)
    named = [body for body in bodies if re.match(r"\d+ minutes", body)]
    assert len(plans) == len(named) > 4
    for total, body in zip(plans, named, strict=True):
        minutes = [int(row[0]) for row in table_rows(body) if row[0].isdigit()]
        assert sum(minutes) == int(total), body.splitlines()[0]
    sums, lesson = {}, None
    (lessons,) = [b for b in bodies if b.startswith("What each lesson takes")]
    for first, _, minutes, *_ in table_rows(lessons):
        lesson = first or lesson
        if minutes.isdigit():
            sums[lesson] = sums.get(lesson, 0) + int(minutes)
    (alone,) = [body for body in bodies if body.startswith("Working alone")]
    rows = [row for row in table_rows(alone) if row[0].isdigit()]
    listed = {f"{row[0]} {row[1].partition(',')[0]}": int(row[2]) for row in rows}
    assert listed == sums
