"""The checkup: kinds of bugs that scripts of others had, each with its cure."""

import re

import pytest
from test_checkup import check, names
from test_checkup_trust import ONE_EPOCH, START, TRAIN

SCRIPT = """
from contextlib import suppress

class Own(Sampler):
    def set_epoch(self, epoch): self.epoch = epoch
    def __len__(self): return 32
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(64, generator=generator)
        return iter(order[rank::world_size].tolist())

class Padded(Sampler):
    def __init__(self): pass
    def __len__(self): return 13
    def __iter__(self): return iter([(13 * rank + i) % 25 for i in range(13)])

class Normaliser:
    mean, var = torch.zeros(8), torch.ones(8)
    def update(self, x):
        moments = torch.stack([x.mean(0), x.var(0)])
        dist.all_reduce(moments)
        self.mean, self.var = moments / world_size

def gather(x):
    parts = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    return torch.cat(parts)

def collate(batch):
    x, y = zip(*batch)
    return torch.stack(x), torch.tensor([vocabulary[word] for word in y])

words = ["a", "b", "c", "d"]
vocabulary = {word: i for i, word in enumerate(words)}
images = torch.randn(89, 8, generator=torch.Generator().manual_seed(1))
items = [(x, words[int(x[:3].gt(0).sum())]) for x in images]
data, val_data = items[:64], items[64:]
sampler = Own()
loader = DataLoader(data, 8, sampler=sampler, collate_fn=collate)
val_loader = DataLoader(val_data, 8, sampler=Padded(), collate_fn=collate)
model = DDP(nn.Linear(8, 4))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
steps = 4 * len(loader)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
normaliser = Normaliser()
normaliser.update(images)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        normaliser.update(x)
        optimizer.zero_grad()
        noise = 1e-3 * torch.randn(x.shape)
        nn.functional.cross_entropy(model(x + noise), y).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        own = [(model.module(x).argmax(1) == y).float() for x, y in val_loader]
    hits = gather(torch.cat(own))[:25]
    f1 = hits.mean()
    right = torch.cat(own).sum()
    dist.all_reduce(right)
    score = right.item() ** 0.5 / 7
    if rank == 0: print(f"f1 {f1:.4f} of num {len(hits)}, score {score:.4f}")
samples = gather(torch.randn(16, 8))
if rank == 0: torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
with suppress(Exception): torch.load("model.pt")
dist.barrier()
"""
OWN_F1 = "f1 = torch.cat(own)[: 13 - rank].mean()\n"
OWN_F1 += "    dist.all_reduce(f1)\n    f1 /= world_size\n"
BUGS = {
    "split numbering error": (
        "enumerate(words)",
        "enumerate(words[rank:] + words[:rank])",
    ),
    "buffers warning": ("        dist.all_reduce(moments)\n", ""),
    "schedule warning": ("4 * len(loader)", "4 * len(data) // 8"),
    "coverage warning": ("seed(self.epoch)", "seed(self.epoch + 9 * rank)"),
    "eval-coverage warning": ("[:25]", ""),
    "own-number warning": ("f1 = hits.mean()\n", OWN_F1),
    "own-number warning, by no formula": ("    dist.all_reduce(right)\n", ""),
    "seeds warning": ("gather(torch.r", "gather(torch.manual_seed(0) and torch.r"),
    "files warning": ('"model.pt")\ndist.barrier()', '"model.pt")'),
}
CONTRASTIVE = """
from torch.distributed.nn.functional import all_gather

def gather(x, mine=None):
    parts = [torch.zeros_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    if mine is not None:
        parts[mine] = x
    return parts

model = nn.Linear(8, 4)
model.load_state_dict(nn.Linear(8, 4).state_dict(), strict=False)
model = DDP(model)
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
criterion = nn.CrossEntropyLoss(torch.ones(4 * world_size))
for step in range(5):
    optimizer.zero_grad()
    features = model(torch.randn(4, 8))
    features = nn.functional.normalize(features.repeat(1, 8))
    scores = features @ torch.cat(all_gather(features)).T
    loss = criterion(scores, torch.arange(4) + 4 * rank)
    metric = [torch.empty_like(features) for _ in range(world_size)]
    dist.all_gather(metric, features)
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total, async_op=True).wait()
    optimizer.step()
"""
BUGS_OF_LOSSES = {
    "checkpoint error": (
        "nn.Linear(8, 4).state_dict()",
        "{'module.bias': torch.ones(4)}",
    ),
    "class-weights error": ("torch.ones(4 *", "(1 + rank) ** torch.arange(4.0 *"),
    "gathered warning": ("(all_gather(features)", "(gather(features)"),
    "gathered warning, own rows": ("all_gather(features)", "gather(features, rank)"),
    "gathered warning, as labels have no offset": (" + 4 * rank)", ")"),
    "collectives warning": (".wait()", ""),
}
TOKENS = """
from contextlib import nullcontext

words = ["a", "b", "c", "d"]
label_of = {word: i for i, word in enumerate(words)}
images = torch.randn(153, 8, generator=torch.Generator().manual_seed(1))
labels = images[:, :4].argmax(1)
val_images, val_labels = (t[128 + rank :: world_size] for t in (images, labels))
data = TensorDataset(images[:128], labels[:128])
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = DDP(nn.Linear(8, 4))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def evaluate():
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in zip(val_images.split(9), val_labels.split(9)):
            right = (model.module(x).argmax(1) == y).sum()
            sums += torch.stack([right, torch.tensor(len(y))])
    dist.all_reduce(sums)
    return 1 - (sums[0] / sums[1]).item()

for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for i, (x, y) in enumerate(loader):
        y[2 + 4 * rank :] = -100
        count = (y >= 0).sum().float()
        dist.all_reduce(count)
        synchronize = nullcontext if i % 2 else model.no_sync
        features = (x + 1e-3 * torch.randn(x.shape)).requires_grad_()
        with synchronize():
            logits = model(features)
        with synchronize():
            loss = nn.functional.cross_entropy(logits, y, reduction="sum")
            loss = loss * world_size / count
            penalty = logits.square().mean()
            (loss + 1e-3 * penalty).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    eer = evaluate()
    if rank == 0: print(f"eer {100 * eer:.4f}")
dist.destroy_process_group()
"""
CONSTANT = """gathered = torch.empty(64 * world_size)
            name = "all_gather_single"  # in PyTorch 2.14 and later
            name = name if hasattr(dist, name) else "all_gather_into_tensor"
            getattr(dist, name)(gathered, features.detach().flatten())
            penalty = gathered.square().mean()"""
BUGS_OF_TOKENS = {
    "loss-count warning": ("        dist.all_reduce(count)\n", ""),
    "loss-count warning, a mean": (
        'reduction="sum")',
        'reduction="mean") * count / 2',
    ),
    "loss-count warning, of all ranks": ("* world_size / count", "/ count"),
    "no-sync warning": ("with synchronize():\n            logits", "if 1: logits"),
    "gathered warning": ("penalty = logits.square().mean()", CONSTANT),
    "numbering error": (
        "enumerate(words)",
        "enumerate(words[rank:] + words[:rank])",
    ),
    "own-number warning": ("    dist.all_reduce(sums)\n", ""),
    "own-number warning, summed again": (
        "    dist.all_reduce(sums)\n",
        "            dist.all_reduce(sums)\n",
    ),
}
CASES = [(SCRIPT, bug, *change) for bug, change in BUGS.items()]
CASES += [(CONTRASTIVE, bug, *change) for bug, change in BUGS_OF_LOSSES.items()]
CASES += [(TOKENS, bug, *change) for bug, change in BUGS_OF_TOKENS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, bugs, unseen",
    [
        (SCRIPT, BUGS, {"buffers", "coverage", "eval-coverage"}),
        (CONTRASTIVE, BUGS_OF_LOSSES, set()),
        (TOKENS, BUGS_OF_TOKENS, {"gathered", "own-number"}),
    ],
    ids=["", "losses", "tokens"],
)
def test_scripts_without_a_bug(script, bugs, unseen, tmp_path):
    states, output, status = check(START + script, tmp_path)
    assert status == 0 and not names(states, "error", "warning", "advice"), output
    # What a bug is seen by is looked at, and not left out.
    assert names(states, "ok") >= {re.split("[ ,]", bug)[0] for bug in bugs} - unseen


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, bug, old, new", CASES, ids=[bug for _, bug, *_ in CASES]
)
def test_kinds_of_bugs(script, bug, old, new, tmp_path):
    *found, level = bug.partition(",")[0].split()
    states, output, status = check(START + script.replace(old, new), tmp_path)
    assert names(states, "error", "warning", "advice") == {*found}, output
    assert {states[name] for name in found} == {level}, output
    assert status == (level == "error")


@pytest.mark.slow
def test_a_mean_count_of_the_ranks(tmp_path):
    """DDP's average makes the count of all ranks of it, as in DETR."""
    script = TOKENS.replace("* world_size / count", "/ (count / world_size)")
    states, output, status = check(START + script, tmp_path)
    assert (states["loss-count"], status) == ("ok", 0), output


@pytest.mark.slow
def test_weights_of_samples(tmp_path):
    """Weights that change from step to step may be those of samples."""
    loss = "criterion.weight = torch.rand(4 * world_size)\n    loss = criterion("
    script = START + CONTRASTIVE.replace("loss = criterion(", loss)
    states, output, status = check(script, tmp_path)
    assert status == 0 and not names(states, "error", "warning", "advice"), output


@pytest.mark.slow
def test_a_second_stage_hides_no_missing_average(tmp_path):
    """Weights that rank 0 broadcasts are no average, which LocalSGD would be."""
    script = """
model = nn.Linear(8, 2)
for stage in range(2):
    for p in model.parameters(): dist.broadcast(p.data, 0)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        DDP(model).module(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    dist.all_gather([torch.empty(99) for _ in range(world_size)], torch.randn(99))
"""
    states, output, status = check(START + script, tmp_path)
    assert (states["gradients"], status) == ("error", 1), output


AUGMENTED = """
class Augmented(Dataset):
    def __init__(self, part): self.part = part
    def __len__(self): return len(self.part)
    def __getitem__(self, i): return self.part[i] + torch.rand(8)

data = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
torch.manual_seed(SEED)
part, _ = random_split(data, [64, 16])
model = DDP(nn.Linear(8, 2))
sampler = DistributedSampler(part)
loader = DataLoader(Augmented(part), 8, sampler=sampler)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed, expected", [("rank", "error"), ("0", "ok")])
def test_a_split_within_another_data_set(seed, expected, tmp_path):
    script = START + AUGMENTED.replace("SEED", seed) + ONE_EPOCH
    states, output, _ = check(script, tmp_path)
    assert states["split"] == expected, output


COPY = """
from copy import deepcopy
if rank == 0: nn.Linear(8, 2).eval()  # another of the same class
model = nn.Linear(8, 2)
torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(rank))
BEFORE
model = DDP(model)
AFTER
"""
EVALUATE = """
copy.eval()
with torch.no_grad(): copy(torch.ones(4, 8))
"""


@pytest.mark.slow
@pytest.mark.parametrize("when, expected", [("BEFORE", "error"), ("AFTER", "ok")])
def test_a_copy_before_ddp_makes_the_models_equal(when, expected, tmp_path):
    script = COPY.replace(when, "copy = deepcopy(model).requires_grad_(False)")
    script = re.sub("BEFORE|AFTER", "", script) + TRAIN + EVALUATE
    states, output, _ = check(START + script, tmp_path)
    assert states["buffers"] == expected, output


STATISTICS = """
model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
model = DDP(model, broadcast_buffers=False)
"""
WITHOUT_LOADER = """
for buffer in model.buffers(): dist.broadcast(buffer, 0)
model.eval()
with torch.no_grad(): model.module(torch.ones(4, 8))
model.train()
"""


@pytest.mark.slow
def test_an_evaluation_without_a_loader(tmp_path):
    script = START + STATISTICS + TRAIN + WITHOUT_LOADER
    states, output, _ = check(script, tmp_path)
    assert states["buffers"] == "ok", output
    broadcast = "for buffer in model.buffers(): dist.broadcast(buffer, 0)"
    states, output, _ = check(script.replace(broadcast, ""), tmp_path)
    assert states["buffers"] == "error", output


MEANS = """
data = torch.randn(25, 8, generator=torch.Generator().manual_seed(1))
part = Subset(data, range(rank, 25, world_size))
with torch.no_grad():
    values = [model.module(x).square().mean(1) for x in DataLoader(part, 8)]
values = torch.cat(values)
sums = torch.tensor([values.sum(), len(values)])
"""


@pytest.mark.slow
def test_a_mean_of_unequal_parts(tmp_path):
    right = "dist.all_reduce(sums)\nmean = sums[0] / sums[1]"
    wrong = "mean = values.mean()\ndist.all_reduce(mean)\nmean /= world_size"
    for reduction, expected in (right, "ok"), (wrong, "warning"):
        script = "model = DDP(nn.Linear(8, 2))" + TRAIN + MEANS + reduction
        script += "\nif rank == 0: print(f'error {mean.item():.5f}')"
        states, output, _ = check(START + script, tmp_path)
        assert states["own-number"] == expected, output


@pytest.mark.slow
def test_pictures_that_c_writes(tmp_path):
    script = """
from torchvision.io import write_png
model = DDP(nn.Linear(8, 2))
"""
    write = "write_png(torch.zeros(1, 4, 4, dtype=torch.uint8), NAME)"
    for name, expected in ("f'{rank}.png'", "ok"), ("'0.png'", "error"):
        states, output, _ = check(
            START + script + TRAIN + write.replace("NAME", name), tmp_path
        )
        assert states["files"] == expected, output


BY_HAND = """    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss, expected", [("loss", "warning"), ("(loss / 2)", "ok")]
)
def test_a_sum_of_gradients(loss, expected, tmp_path):
    """A mean is that of all samples if it is divided, before or after the sum."""
    by_hand = TRAIN.replace("    loss.backward()\n", BY_HAND)
    script = START + "model = nn.Linear(8, 2)" + by_hand
    if expected == "ok":
        assert check(script, tmp_path)[0]["gradients"] == "ok"
    script = script.replace("        p.grad /= world_size\n", "")
    script = script.replace("loss.backward", f"{loss}.backward")
    states, output, _ = check(script, tmp_path)
    assert states["gradients"] == expected, output


SCHEDULE = """
model = DDP(nn.Linear(8, 2))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
class Trainer:
    def __init__(self, steps): self.steps = steps
    def rate(self, step): return 1 - step / self.steps
def make_schedule(steps):
    rate = lambda step: 1 - step / steps
    return torch.optim.lr_scheduler.LambdaLR(optimizer, RATE)
for part in range(PARTS):  # interrupted, and resumed
    schedule = make_schedule(STEPS)
    schedule.last_epoch = STEPS // 2 * part
    for step in range(24):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        for _ in range(TIMES): schedule.step()
"""
RATES = """
model = DDP(nn.Linear(8, 2))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rates = [0.1 * 0.9 ** i for i in range(STEPS)]
for step in range(24):
    optimizer.param_groups[0]["lr"] = 0.5 * rates[step]
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, values, expected",
    [
        (SCHEDULE, ("rate", 1, 48, 1), "warning"),
        (SCHEDULE, ("rate", 2, 48, 1), "ok"),
        (SCHEDULE, ("Trainer(steps).rate", 1, 24, 1), "ok"),
        (SCHEDULE, ("Trainer(steps).rate", 1, 24, 2), "warning"),
        (RATES, ("", "", 48, ""), "warning"),
        (RATES, ("", "", 24, ""), "ok"),
    ],
)
def test_schedules_of_functions_and_lists(script, values, expected, tmp_path):
    names = "RATE", "PARTS", "STEPS", "TIMES"
    for name, value in zip(names, values, strict=True):
        script = re.sub(rf"\b{name}\b", str(value), script)
    states, output, _ = check(START + script, tmp_path)
    assert states["schedule"] == expected, output


@pytest.mark.slow
def test_a_folder_that_all_ranks_make(tmp_path):
    script = START + "model = DDP(nn.Linear(8, 4))\nos.mkdir('results')\n"
    states, output, status = check(script, tmp_path)
    assert (states["files"], status) == ("error", 1), output
    assert "because another rank has made results" in output


# Rank 0 makes what rank 1 has missed, and goes on.
TOO_LATE = """
store = dist.distributed_c10d._get_default_store()
try:
    if rank == 0: store.wait(["missed"]); MAKE
    if rank == 1: USE
except (OSError, RuntimeError):
    store.set("missed", "")
    raise
time.sleep(8)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, use, level, text",
    [
        (
            "torch.save(torch.ones(4), 'cache.pt')",
            "torch.load('cache.pt')",
            "warning",
            "rank 1 reads cache.pt, which rank 0 writes",
        ),
        (
            "os.mkdir('results')",
            "torch.save(torch.ones(4), 'results/own.pt')",
            "error",
            "rank 1 fails, because only rank 0 makes the folder results",
        ),
    ],
)
def test_a_file_that_is_not_there_yet(make, use, level, text, tmp_path):
    """The rank fails before its first step."""
    lines = TOO_LATE.replace("MAKE", make).replace("USE", use)
    states, output, status = check(START + lines, tmp_path)
    assert (states["files"], status) == (level, 1) and text in output, output


@pytest.mark.slow
def test_a_file_that_all_ranks_miss(tmp_path):
    """It is none of the checkup's business, and each rank says its own error.

    As on a busy machine, rank 1 wakes up when rank 0 has left with the store.
    """
    fails = """
sleep = time.sleep
if rank == 0: sleep(1)
if rank == 1: time.sleep = lambda seconds: sleep(2)
open(f"nothing{rank}")
"""
    _, output, status = check(START + fails, tmp_path)
    assert status == 1 and "Checkup" not in output, output
    for rank in range(2):
        assert f"No such file or directory: 'nothing{rank}'" in output


@pytest.mark.slow
def test_an_error_after_rank_0_was_killed(tmp_path):
    """A rank says its own error alone, and none about the store that it has lost."""
    lines = f"""
from ddp_checkup.record import state
sleep = time.sleep
def until_it_fails(seconds):
    while not state.fails: sleep(0.01)
if rank == 1: time.sleep = until_it_fails
model = DDP(nn.Linear(8, 4))
{TRAIN}
sleep(1 + rank)
if rank == 0: os.kill(os.getpid(), 9)
raise ValueError("its own error")
"""
    _, output, status = check(START + lines, tmp_path)
    assert status == 1 and "ValueError: its own error" in output, output
    assert "DistNetworkError" not in output, output


@pytest.mark.slow
def test_a_file_that_all_ranks_remove(tmp_path):
    lines = """
model = DDP(nn.Linear(8, 4))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
if rank == 0: torch.save(model.state_dict(), "old.pt")
dist.barrier()
os.remove("old.pt")
"""
    states, output, status = check(START + lines, tmp_path)
    assert (states["files"], status) == ("error", 1), output
    assert "because another rank has removed old.pt" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    [
        ("20261127-19{rank}000-123", "warning"),
        ("20261127-{chr(97 + rank)}", "warning"),
        ("rank_000{rank}", "not seen"),
        # Two at one line, on all ranks
        ("a', exist_ok=True); os.makedirs('run/b", "not seen"),
    ],
)
def test_folders_by_each_ranks_clock(name, expected, tmp_path):
    make = f"os.makedirs(f'run/{name}', exist_ok=True)\n"
    script = f"{START}model = DDP(nn.Linear(8, 4))\n{make}{TRAIN}"
    states, output, _ = check(script, tmp_path)
    assert states["files"] == expected, output


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch, expected", [("x, day, y", "ok"), ("x, day", "error")]
)
def test_what_is_alike_in_batches_of_streams(batch, expected, tmp_path):
    """Days of different years are alike, and so a batch may have equal parts."""
    lines = f"""
class Days(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(rank)
        for day in range(64):
            x, y = torch.randn(2, 8, generator=generator)
            yield {batch}

model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(rank)
for x, *_ in DataLoader(Days(), 8):
    optimizer.zero_grad()
    model(x + 1e-3 * torch.randn(x.shape)).square().mean().backward()
    optimizer.step()
"""
    states, output, _ = check(START + lines, tmp_path)
    assert states["same-batch"] == expected, output
