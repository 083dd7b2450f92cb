"""The rule of the pair, for every pair in the one list."""

import re
import subprocess
from keyword import kwlist

import pytest
from conftest import REPOSITORY

from pairs import PAIRS

SCRIPTS = sorted({script for pair in PAIRS for script in pair[:2]})
SHARD = "a shard per rank"
NO_COUNTERPART = {
    "from dataset import random_sequences",  # a stream has no data set
    "train_set = random_sequences(args.sequences, args.length)",
    f"sampler = DistributedSampler(train_set, seed=args.seed)  # DDP: {SHARD}",
    "model = make_model(args)",  # TensorFlow's scope is opened around it
    # Local SGD and FSDP wrap nothing in DDP
    "ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients",
    "from torch.nn.parallel import DistributedDataParallel as DDP"
    "  # DDP: wraps a model",
}
# The DDP lines of all pairs are one block: each of these statements has one comment,
# on its line or above it.
CANONICAL = (
    "import torch.distributed",
    "from torch.utils.data import",
    "from common.device import",
    r".* = get_ranks\(",
    r".* = get_device\(",
    r"dist\.init_process_group",
    r"torch\.manual_seed",
    "from torch.nn.parallel import",
    r".*\bDDP\(",
    r"log = RunLog\(",
    r".* = DistributedSampler\(",
    r".*\.set_epoch\(",
    r"(.* \+?= )?train(_step)?\(",
    r".* = Subset\(",
    r"dist\.all_reduce\(",
    r"ddp_model\.broadcast_buffers",
    r"dist\.destroy_process_group",
)
each_pair = pytest.mark.parametrize(
    "left, right, tag, most", [pair[:4] for pair in PAIRS], ids=str
)


def differing_rows(left, right, *options):
    command = ["diff", "-W", "180", "-y", "--suppress-common-lines", *options]
    command += [left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True)
    assert done.returncode < 2, done.stderr
    return len(done.stdout.splitlines())


@each_pair
def test_rows(left, right, tag, most):
    rows = differing_rows(left, right)
    assert 0 < rows <= most
    assert rows == differing_rows(left, right, "-w", "-B"), "re-indented"


def hunks(left, right):
    """Yield each hunk's left rows and right rows, from the top as diff -y does."""
    command = ["diff", "-U0", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    for hunk in re.split(r"^@@.*\n", done.stdout, flags=re.M)[1:]:
        rows = hunk.splitlines()
        yield tuple([row[1:] for row in rows if row[0] == sign] for sign in "-+")


def first_names(row, tag):
    """Return what a row sets, or else how it begins and what it calls."""
    row = row.strip().removeprefix(f"# {tag}: ")
    if setting := re.match(r"([\w., ]+?) = ", row):
        return {*setting[1].split(", ")}
    begins = re.match(r"(?:from )?\W*([\w.]+)?", row)[1]
    code = row.split("#")[0]
    if begins in kwlist or "(" not in code:  # such as return, or arguments
        return {*re.findall(r"\w+", code)} - {*kwlist, "self"}
    return {begins, *re.findall(r"(\w+)\(", code)}


@each_pair
def test_a_changed_row_faces_its_counterpart(left, right, tag, most):
    for old, new in hunks(left, right):
        without = [row for row in old if row in NO_COUNTERPART]
        assert len(old) <= len(new) or old == without, old
        names = [first_names(row, tag) for row in new if row.strip()]
        for row in old:
            if row.strip() not in NO_COUNTERPART and row.strip()[0] not in '#"':
                assert first_names(row, tag) & set().union(*names), f"{row}\n{new}"


@each_pair
def test_every_hunk_explains_itself(left, right, tag, most):
    for old, new in hunks(left, right):
        if not new and {*old} <= NO_COUNTERPART:
            continue  # an import that is no longer used
        docstring = new[0].startswith('"""')  # its first line is the script's own
        assert docstring or any(f"# {tag}: " in row for row in new), new


@pytest.mark.parametrize("statement", CANONICAL)
def test_the_same_line_reads_the_same(statement):
    reasons = set()
    for script in SCRIPTS:
        text = (REPOSITORY / script).read_text()
        commented = re.findall(r"^ *(\S.*)  # DDP: (.+)$", text, re.M)
        above = re.findall(r"^ *# DDP: (.+)\n *(.+)$", text, re.M)
        for code, reason in commented + [pair[::-1] for pair in above]:
            if re.match(statement, code):
                reasons.add(reason.partition(",")[0])  # exercise 8 says more
    assert len(reasons) == 1, reasons


def test_each_docstring_opens_with_a_line_of_its_own():
    lessons = [script for script in SCRIPTS if "clinic" not in script]
    openings = {
        (REPOSITORY / script).read_text().split("\n")[0] for script in lessons
    }
    assert len(openings) == len(lessons)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_projected(script):
    lines = (REPOSITORY / script).read_text().splitlines()
    assert len(lines) < 200
    assert max(map(len, lines)) <= 85
    opening = "\n".join(lines[:10])  # it opens with the command that runs it
    assert re.search(r"^    sbatch (run|slurm_|jobscript)\S*\.sh", opening, re.M)


def test_the_tables_have_the_row_counts():
    text = (REPOSITORY / "docs/PAIRS.md").read_text()
    row = r"^\| (.+) \| `(\S+\.py)` \| `(\S+\.py)` \| (\w+) \| (\d+) \|$"
    table = {
        (left, right): (tag, title, int(number))
        for title, left, right, tag, number in re.findall(row, text, re.M)
    }
    rows = {
        (left, right): (tag, title, differing_rows(left, right))
        for left, right, tag, _, title in PAIRS
    }
    assert table == rows
    text = (REPOSITORY / "cinic_lab/README.md").read_text()
    row = r"^\| .+ \| `(\w+\.py)` \| `(\w+\.py)` \| (\d+) \|"
    for right, left, number in re.findall(row, text, re.M):
        assert rows[f"cinic_lab/{left}", f"cinic_lab/{right}"][-1] == int(number)
