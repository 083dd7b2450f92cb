"""Every command of every page: checked on each push, and typed once a week.

A block of commands is ```bash. What a laptop cannot do has a mark before it, as in
<!-- needs a GPU -->. The commands of two pages are typed on each push.
"""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from conftest import (
    EXERCISES,
    REPOSITORY,
    call,
    copy_checkout,
    load,
    loaded,
    path_without_sbatch,
)

FENCE = re.compile(
    r"^( *)(?:<!-- ([^\n]*) -->\n *)?```bash\n(.*?)\n *```$", re.M | re.S
)
COMMAND = re.compile(
    r"^    +(cd|source|python \S+py|sbatch|bash|export|make|sudo|ssh|srun)\b", re.M
)
MARKS = {
    "needs a GPU",
    "needs Slurm",
    "needs a network",
    "needs an account",
    "needs another machine",
    "runs until you end it",
    "takes long",
}
TEXTS = {
    str(file.relative_to(REPOSITORY)): file.read_text()
    for pattern in ("*.md", "[a-z]*/*.md", "tools/predict/*.md")
    for file in sorted(REPOSITORY.glob(pattern))
}
PAGES = [file for file, text in TEXTS.items() if "```bash" in text]
TOOLS = ["docs/SPEEDUP.md", "tools/README.md", "tools/predict/README.md"]
TYPED_ON_EACH_PUSH = ["README.md", "mnist_multigpu/README.md"]
TYPED_WEEKLY = TOOLS + [
    file
    for file in PAGES
    if file.startswith(EXERCISES)
    and not file.endswith(("ANSWERS.md", "OUTPUT.md"))
    and file not in TYPED_ON_EACH_PUSH
]
TENSORFLOW = "dp_ddp_intro/tensorflow_scripts"
loaded.update({"exercise8/solutions": {}, TENSORFLOW: {}})
# What starts a script, and what else a page may type: its words are only files.
STARTERS = {"python", "python3", "sbatch", "bash", "torchrun", "srun"}
PROGRAMS = """[[ apt apt-get chmod cp cut ddp-checkup diff done echo git install kill
job_stats.py less ln ls mkdir nvidia-cuda-mps-control nvidia-smi pip rm scancel scp
seff sleep source squeue ssh tail test timeout top touch true wait watch"""
BEFORE_A_PROGRAM = {"env", "sudo", "until", "do", "!"}
BETWEEN_COMMANDS = {";", "&", "&&", "|", "||", "(", ")"}
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w.-]+\.(py|sh|txt|ipynb|json|tar|lprof)")
A_READERS_OWN = {"train.py"}


def blocks(file):
    """Return (mark or None, [commands]) of each block."""
    found = []
    for indent, mark, body in FENCE.findall((REPOSITORY / file).read_text()):
        body = re.sub(f"^{indent}", "", body, flags=re.M)
        commands = re.split(r"(?<!\\)\n", body)
        found.append((mark or None, [c for c in commands if c.strip()]))
    return found


@pytest.mark.parametrize("file", PAGES)
def test_commands_are_marked(file):
    text, found = TEXTS[file], blocks(file)
    assert text.count("```bash") == len(found)
    assert {mark for mark, _ in found} <= {None, *MARKS}
    assert not COMMAND.search(FENCE.sub("", text))
    typed = [c for mark, commands in found if mark is None for c in commands]
    assert not [c for c in typed if "JOBID" in c or "--nodes=" in c]


class Parsed(BaseException):
    """Ends a script that has parsed its options."""


def parse(script, options):
    """Run a script until it has parsed these options; return them."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(parser):
        raise Parsed(parse_args(parser))

    folder = str(script.parent.relative_to(REPOSITORY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        for name in ("tensorflow", "keras", "keras.utils"):
            if folder == TENSORFLOW:  # which has an environment of its own
                patch.setitem(sys.modules, name, MagicMock())
        if script.name == "checkup":
            patch.syspath_prepend(script)
            module = importlib.import_module("ddp_checkup.cli")
        elif folder in loaded:
            module = load(folder, script.stem)
        else:
            module = importlib.import_module(script.stem)
        with pytest.raises(Parsed) as ended:
            call(module, *options)
    return ended.value.args[0]


class Reader:
    """Checks the commands of a page, and knows where they are typed."""

    def __init__(self, folder):
        self.folder, self.copies = folder, {}
        self.variables = {"PYTHON": "python", "PWD": "."}

    def value(self, found):
        name = found[1] or found[2]
        if name == "SMALL":
            return (self.folder / "small.txt").read_text().strip()
        return self.variables.get(name, "1")

    def type(self, line):
        """Check each command of a line."""
        line = re.sub(r"^%env (\w+)=(.*)", r'\1="\2"', line).lstrip("!%")  # notebook
        line = re.sub(r"\bmulti-?gpu\b", str(REPOSITORY), line)  # the reader's clone
        line = line.replace("\\\n", " ").replace("$(cat small.txt)", "$SMALL")
        line = re.sub(r"\$\(+.*?\)+", "1", line)
        line = re.sub(r"> *[\w./]+", "", line)  # output
        line = re.sub(r"\$\{(\w+).*?\}|\$(\w+)", self.value, line)
        words = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word not in BETWEEN_COMMANDS:
                words.append(word)
            elif words:
                self.check(words)
                words = []

    def check(self, words):
        """Check a command: its program, its files, its script and their options."""
        if words[0] in BEFORE_A_PROGRAM or "=" in words[0]:
            name, is_set, value = words[0].partition("=")
            if is_set:
                self.variables[name] = value
            return words[1:] and self.check(words[1:])
        program = Path(words[0]).name
        if program == "export":
            self.check(words[1:])
        elif program == "cd":
            self.go(words[1])
        elif program == "make":
            self.make(words[1:])
        else:
            known = STARTERS | {*PROGRAMS.split()}
            assert program in known, f"{words}: a program that this test must know"
            if program == "cp":
                self.copies[self.path(words[-1])] = self.path(words[-2])
            for word in words[1:]:
                self.find(word.rpartition("=")[2])
            if program in STARTERS and "pytest" not in words:
                self.start(words[1:])

    def path(self, word):
        return Path(os.path.normpath(self.folder / word))

    def find(self, word):
        """Check that a file is there, or made by a run, and so ignored by git."""
        path = self.path(word)
        ours = PATH.fullmatch(word) and path.is_relative_to(REPOSITORY)
        known = path.exists() or path in self.copies or word in A_READERS_OWN
        if ours and not known:
            command = ["git", "check-ignore", path, f"{path}/"]  # or a folder
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True)
            assert done.returncode == 0, f"no {word} in {self.folder}"

    def go(self, folder):
        if not folder.startswith("/projects/"):  # a cluster's
            self.folder = self.path(folder)
            assert self.folder.is_dir(), f"cd {folder}"

    def make(self, words):
        """Check a target, and the scripts that it starts."""
        folder = self.folder
        # The PYTHON of a `make test PYTHON=...` around this test would be kept.
        options = "--dry-run", "--no-print-directory", "PYTHON=python"
        command = ["make", *options, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if words[:1] == ["-C"]:
            self.go(words[1])
        for line in done.stdout.splitlines():
            if ".py" in line:
                self.type(line)
        self.folder = folder

    def start(self, words):
        """Check the script that these words start, and its options."""
        while words and not words[0].endswith((".py", ".sh", "checkup")):
            words = words[1:]
        if not words or words[0] in A_READERS_OWN:
            return
        script, *options = self.path(words[0]), *words[1:]
        script = self.copies.get(script, script)
        if script.suffix == ".sh":
            line = r'^[^#\n]*?(\w+\.py)(.*)\$small "\$@"'
            own = re.search(line, script.read_text(), re.M)
            self.start([own[1], *own[2].split(), *options] if own else options)
        elif script.name == "flight_recorder.py":
            self.start(options)
        elif script.name == "checkup":
            parsed = parse(script, options)
            self.start([parsed.script or "", *parsed.arguments])
            self.start(shlex.split(parsed.reference or ""))
        elif options or "parse_args" in script.read_text():
            parse(script, options)


@pytest.mark.parametrize("file", PAGES)
def test_commands_name_scripts_options_and_files_that_exist(file):
    """They are typed in the folder that the text above them names."""
    in_folder = file.endswith(("ANSWERS.md", "OUTPUT.md"))
    here = in_folder or file.startswith("checkup/")
    reader = Reader((REPOSITORY / file).parent if here else REPOSITORY)
    texts = FENCE.split(TEXTS[file])[::4]
    for above, (_, commands) in zip(texts, blocks(file), strict=False):
        in_root = re.search(r"in the repository's\s+root", above, re.I)
        is_notebook = commands[0].startswith(("!", "%"))
        new_section = re.search("^#", above, re.M) and file.startswith("docs/")
        if in_root or (new_section and not is_notebook):
            reader.folder = REPOSITORY
        for folder in {*re.findall("in `(.+?)`", above)} & {*EXERCISES}:
            reader.folder = REPOSITORY / folder
        for command in commands:
            reader.type(command)


@pytest.mark.parametrize("file", TEXTS)
def test_options_and_targets_in_running_text_exist(file):
    """As in `cinic.py --batch-size 64` and `make venv`."""
    for code in re.findall("(?<!`)`([^`]+)`(?!`)", FENCE.sub("", TEXTS[file])):
        name, _, options = " ".join(code.split()).partition(" ")
        if name == "make":
            Reader(REPOSITORY).type(code)
        elif name.endswith(".py") and options.startswith("--"):
            folders = Path(file).parent, *EXERCISES
            scripts = [REPOSITORY / folder / name for folder in folders]
            for script in filter(Path.exists, scripts):
                parse(script, options.split())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "file",
    [pytest.param(page, marks=pytest.mark.slow) for page in TYPED_ON_EACH_PUSH]
    + [pytest.param(page, marks=pytest.mark.weekly) for page in TYPED_WEEKLY],
)
def test_commands_work_as_typed(file, sample, tmp_path):
    """In one shell, but with less data and fewer epochs than a reader has."""
    if "TENSORFLOW" in file and not (REPOSITORY / ".venv-tensorflow").exists():
        pytest.skip("no TensorFlow: make venv-tensorflow")
    copy = copy_checkout(tmp_path / "repository")
    # What sample_data.py would make, a tenth of it. CINIC's first run is stopped
    # while it trains, and so takes all data and all its epochs.
    if file not in TOOLS:  # their model's data is random
        options = {"dirs_exist_ok": True, "ignore": shutil.ignore_patterns("CINIC")}
        shutil.copytree(sample, copy / "data/sample", **options)
    first = "sbatch run.sh cinic.py --resume" if "cinic" in file else None
    less = "--epochs 1"
    if file.startswith(("dp_ddp_intro", "beyond_ddp", "docs/", "tools/")):
        less += " --sequences 128"
    if "cifar" in file:  # a trace takes eight steps
        less += " --batch-size 8"
    for small in [] if first else copy.glob("*/small.txt"):
        small.write_text(f"{small.read_text().strip()} {less}\n")
    typed = [c for mark, commands in blocks(file) if not mark for c in commands]
    script, statuses = "", tmp_path / "statuses"
    for command in typed:
        shorter = command.replace("--sequences 256", "--sequences 128")
        script += f'{shorter}\necho $PIPESTATUS >> "{statuses}"\n'
        if first and command.startswith(first):
            script += f'echo "$(< small.txt) {less}" > small.txt\n'
            script += f'cp "{sample}"/CINIC/* "$DATADIR"/CINIC/\n'
    env = {"HOME": str(tmp_path), "TERM": "dumb", "CUDA_VISIBLE_DEVICES": "-1"}
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
