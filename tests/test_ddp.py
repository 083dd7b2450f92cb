"""What DDP promises, of each script that keeps it: N processes train as one does.

Twice: the script as it is under the checkup (clinic/), and without what is random
beside its counterpart for one process, number by number.
"""

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import REPOSITORY, slow
from record_training import record
from run_ranks import Run
from test_checkup import checkup, failed
from torch.nn.utils import parameters_to_vector

from pairs import BEYOND, CIFAR, CINIC, EIGHT, INTRO, MNIST, PAIRS, STRONG

BATCH = 12  # images of all ranks
OPTIONS = {  # of all scripts of an exercise
    "exercise8": "--backbone=tinyvgg --epochs=2 --finetune-epochs=2",
    "mnist_multigpu": "--epochs=3 --lr=0.05 --log-interval=100 --save-model",
    "cifar100_demo": "--arch=resnet18 --image-size=40 --epochs=2 --no-profile",
    "cinic_lab": "--arch=resnet18 --epochs=2 --lr=0.01 --seed=0",
    "dp_ddp_intro": "--layers=4 --width=32 --heads=4 --length=16 --lr=0.3",
}
RECORDED = {"cifar100_demo": "--steps=2"}  # of three
RECORDED["dp_ddp_intro"] = "--sequences=48 --epochs=5"
CHECKED = {  # the checkup wants steps in each epoch that print nothing
    "exercise8": "--batch-size=10",
    "mnist_multigpu": "--batch-size=64",
    "cifar100_demo": "--batch-size=8 --steps=11",
    "cinic_lab": "--batch-size=12",
    "dp_ddp_intro": "--batch-size=4 --sequences=48 --epochs=2",
}
for options in (OPTIONS, RECORDED, CHECKED):
    options["beyond_ddp"] = options["dp_ddp_intro"]


class Case(NamedTuple):
    script: str
    counterpart: str  # for one process
    ranks: int = 3
    options: str = ""
    per_node: int = 1  # so that rank and local_rank differ
    copies: int = 1  # ranks so far apart have equal weights; 0: none


LARGE = f"{EIGHT}_largedata.py"
AMP = f"{CINIC}_tensorboard.py"
SINGLE = f"{INTRO}/single.py"
ONE_PROCESS = [
    Case(f"{MNIST}_multigpu.py", f"{MNIST}_singlegpu.py", 0, "--batch-size=6"),
    Case(f"{CIFAR}_data_parallel.py", f"{CIFAR}_cifar100.py", 0, "--batch-size=6"),
    Case(f"{INTRO}/dp.py", SINGLE, 0, "--batch-size=6"),
    Case(f"{CINIC}_dp.py", AMP, 0, "--batch-size=6 --dtype=fp32"),
    Case(f"{CINIC}_amp.py", AMP, 0, "--dtype=fp32"),
    Case(f"{CINIC}.py", AMP, 0),
]
DDP = [
    Case(f"{EIGHT}_multigpu.py", f"{EIGHT}.py"),
    Case(f"{EIGHT}_largedata_multigpu.py", LARGE),
    Case(f"{STRONG}.py", f"{EIGHT}.py", 3, f"--batch-size={BATCH}"),
    Case(f"{MNIST}_ddp.py", f"{MNIST}_singlegpu.py"),
    Case(f"{CIFAR}_ddp_cifar100.py", f"{CIFAR}_cifar100.py"),
    Case(f"{CINIC}_ddp.py", AMP, 3, "--dtype=fp32"),
    Case(f"{CINIC}_requeue.py", AMP, 3, "--dtype=fp32"),
    Case(f"{INTRO}/ddp.py", SINGLE),
]
HOOKS = [("bf16_gradients", 0.03), ("powersgd", 0.3)]  # and how far losses differ
OUTER = "--local-steps=1 --outer-lr=1 --outer-momentum=0"
BEYOND_DDP = [
    Case(f"{BEYOND}/accumulate.py", SINGLE, 2, "--accumulate=3 --batch-size=2"),
    Case(f"{BEYOND}/local_sgd.py", SINGLE, 3, "--local-steps=1", copies=0),
    Case(f"{BEYOND}/diloco.py", SINGLE, 3, OUTER, copies=0),
    Case(f"{BEYOND}/elastic.py", SINGLE, 3, f"--batch-size={BATCH}"),
    Case(f"{BEYOND}/zero.py", SINGLE),
    Case(f"{BEYOND}/checkpointing.py", SINGLE),
    Case(f"{BEYOND}/fsdp.py", SINGLE, copies=0),
    Case(f"{BEYOND}/fsdp_checkpoint.py", SINGLE, copies=0),
    Case(f"{BEYOND}/hsdp.py", SINGLE, 4, per_node=2, copies=2),
    Case(f"{BEYOND}/tensor_parallel.py", SINGLE, 2, copies=0),
    Case(f"{BEYOND}/fsdp_tp.py", SINGLE, 4, copies=0),
    Case(f"{BEYOND}/context_parallel.py", SINGLE, 4),
    Case(f"{BEYOND}/pipeline.py", SINGLE, 2, "--schedule=1F1B", copies=0),
    Case(f"{BEYOND}/pipeline.py", SINGLE, 2, "--schedule=Interleaved1F1B", copies=0),
]
ELSEWHERE = {  # compared in another way
    f"{CINIC}_wandb.py": "test_cinic.py",
    f"{CINIC}_syncbn.py": "test_cinic.py",
    f"{BEYOND}/compiled.py": "test_beyond.py",
    f"{BEYOND}/streaming.py": "test_streaming.py",
    f"{BEYOND}/experts.py": "test_beyond.py",
    f"{BEYOND}/bf16_gradients.py": "below",
    f"{BEYOND}/powersgd.py": "below",
    f"{INTRO}/ddp_unfinished.py": "test_checkup.py",
}


def test_all_scripts_of_pairs_are_compared():
    cases = *ONE_PROCESS, *DDP, *BEYOND_DDP
    compared = {script for case in cases for script in case[:2]}
    scripts = {script for pair in PAIRS for script in pair[:2]}
    others = {s for s in scripts if s.startswith("clinic") or "tensorflow" in s}
    assert compared | {*ELSEWHERE} | others == scripts


@pytest.fixture(scope="module")
def recorded(sample, tmp_path_factory):
    """Run a script once; return what each rank noted, its result and its losses."""

    @functools.cache
    def run_once(script, ranks=0, options="", per_node=1):
        exercise = script.split("/")[0]
        batch = f"--batch-size={BATCH // max(1, ranks)}"
        own = RECORDED.get(exercise, "")
        options = f"{OPTIONS[exercise]} {own} {batch} {options}".split()
        patch = record
        how = {"ranks": ranks, "per_node": per_node, "patch": patch}
        folder = tmp_path_factory.mktemp("run")
        run = Run(folder, sample, script, *options, **how)
        seen = run.results()
        shown = re.findall(r"(?i)\bloss:? ([\d.]+)", run.output())
        for text in map(run.output, range(1, ranks)):  # PyTorch warns in each rank
            assert not text or "Warning: " in text, "rank 0 speaks for all"
        assert len([f for f in folder.rglob("*") if "tfevents" in f.name]) <= 1
        (result,) = map(json.loads, (folder / "logs/results.jsonl").open())
        return seen, result | {"losses": [float(loss) for loss in shown]}

    return run_once


def name_of(case):
    """Return how a test is called: with its script, and what it is run with."""
    return f"{Path(case.script).stem} {case.options}".strip()


@pytest.mark.parametrize("case", [*ONE_PROCESS, *DDP, *BEYOND_DDP], ids=name_of)
def test_it_trains_as_one_process_does(case, recorded):
    script, counterpart, ranks, options, per_node, copies = case
    dtype = "--dtype=fp32" if "cinic" in script else ""
    (alone,), expected = recorded(counterpart, options=dtype)
    seen, result = recorded(script, ranks, options, per_node)
    assert len(alone["means"]) > 2
    for rank in seen:
        for its, ours in zip(rank["means"], alone["means"], strict=True):
            assert its == pytest.approx(ours, rel=1e-4)
    for key, digits in (("accuracy", 1e-6), ("per_epoch", 0), ("losses", 1e-3)):
        assert result[key] == pytest.approx(expected[key], digits), key
    for one, other in zip(seen, seen[copies:] if copies else [], strict=False):
        assert all(map(torch.equal, one["weights"], other["weights"]))
    if copies == 1:
        all_weights = alone["start"], alone["weights"], seen[0]["weights"]
        start, end, own = map(parameters_to_vector, all_weights)
        assert (own - end).abs().max() < 0.01 * (end - start).abs().max()


@pytest.mark.parametrize(
    "script, ranks, options",
    [
        (f"{CIFAR}_cifar100.py", 0, "--amp --dtype=bf16"),
        (f"{CINIC}_amp.py", 0, "--dtype=bf16"),
        slow(f"{BEYOND}/fsdp.py", 3, "--bf16"),
        slow(f"{BEYOND}/fsdp_tp.py", 2, "--bf16"),
    ],
)
def test_16_bits_change_the_digits_and_no_more(script, ranks, options, recorded):
    """Else the option would be lost, or the model would not learn."""
    full, _ = recorded(script, ranks, "--dtype=fp32" if "cinic" in script else "")
    half, _ = recorded(script, ranks, options)
    for whole, its in zip(full[0]["means"], half[0]["means"], strict=True):
        assert 0 < abs(its["loss"] - whole["loss"]) < 0.03 * whole["loss"]


@pytest.mark.parametrize("script, most", HOOKS)
def test_compressed_gradients_train_nearly_as_well(script, most, recorded):
    """PowerSGD after ten steps only: from the third epoch of four steps."""
    full, _ = recorded(f"{INTRO}/ddp.py", 3)
    (first, *others), _ = recorded(f"{BEYOND}/{script}.py", 3)
    pairs = zip(full[0]["means"], first["means"], strict=True)
    changes = [abs(its["loss"] / whole["loss"] - 1) for whole, its in pairs]
    if script == "powersgd":
        assert max(changes[:2]) < 1e-6
        changes = changes[2:]
    assert min(changes) > 0 and max(changes) < most
    for other in others:
        assert all(map(torch.equal, first["weights"], other["weights"]))


REPLICAS = {"start", "gradients", "weights"}
PARTS = {"coverage", "same-batch", "own-number"}
SEEN = REPLICAS | PARTS | {"finite", "set-epoch", "split", "collectives", "files"}
WITH_EVALUATION = "exercise8", "mnist", "cifar", "cinic"
CHECKED_BEYOND = {  # failed on purpose, and not seen
    # Each rank has experts of its own.
    "experts.py": ({"start"}, set()),
    # Ranks share a model, and so a batch.
    "fsdp_tp.py": (set(), REPLICAS | PARTS),
    # Ranks average weights, not gradients.
    "local_sgd.py": (set(), REPLICAS),
}


def check(script, datadir, folder, options=""):
    """Return ({check: state}, output) of a script under the checkup."""
    exercise = script.split("/")[0]
    options = f"{OPTIONS[exercise]} {CHECKED[exercise]} {options}".split()
    words = REPOSITORY / script, *options
    states, output, status = checkup(folder, *words, data=datadir)
    assert status == ("error" in states.values()), output
    return states, output


@pytest.mark.parametrize(
    "case",
    [c if name_of(c) in ("ddp", "cinic_ddp --dtype=fp32") else slow(c) for c in DDP],
    ids=name_of,
)
def test_the_checkup_finds_nothing(case, sample, tmp_path):
    states, output = check(case.script, sample, tmp_path, case.options)
    seen = {name for name, state in states.items() if state == "ok"}
    assert not failed(states) and seen >= SEEN, output
    if case.script.startswith(WITH_EVALUATION):
        assert "eval-coverage" in seen, output


@pytest.mark.slow
@pytest.mark.parametrize("script", CHECKED_BEYOND)
def test_the_checkup_beyond_ddp(script, sample, tmp_path):
    states, output = check(f"{BEYOND}/{script}", sample, tmp_path)
    on_purpose, unseen = CHECKED_BEYOND[script]
    assert failed(states) == on_purpose, output
    assert all(states[name] == "not seen" for name in unseen), output
