"""The checkup: what a loss is made of, and results that nobody waits for."""

import pytest
from test_checkup import check, names
from test_checkup_trust import START

CONTRASTIVE = """
def gather(x):
    parts = [torch.zeros_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    parts[rank] = x
    return torch.cat(parts)

model = nn.Linear(8, 4)
model.load_state_dict(nn.Linear(8, 4).state_dict(), strict=False)
model = DDP(model)
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
criterion = nn.CrossEntropyLoss(torch.ones(4 * world_size))
for step in range(5):
    optimizer.zero_grad()
    features = model(torch.randn(4, 8))
    loss = criterion(features @ gather(features).T, torch.arange(4) + 4 * rank)
    metric = [torch.empty_like(features) for _ in range(world_size)]
    dist.all_gather(metric, features)
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total, async_op=True).wait()
    optimizer.step()
"""
BUGS = {
    "checkpoint error": (
        "nn.Linear(8, 4).state_dict()",
        "{'module.bias': torch.ones(4)}",
    ),
    "class-weights error": ("torch.ones(4 *", "(1 + rank) ** torch.arange(4.0 *"),
    "gathered warning": ("    parts[rank] = x\n", ""),
    "gathered warning, as labels have no offset": (" + 4 * rank)", ")"),
    "collectives warning": (".wait()", ""),
}


@pytest.mark.slow
def test_a_contrastive_loss(tmp_path):
    """What a metric gathers needs no gradient."""
    states, output, status = check(START + CONTRASTIVE, tmp_path)
    assert status == 0 and not names(states, "error", "warning", "advice"), output
    assert names(states, "ok") >= {bug.split()[0] for bug in BUGS}, output


@pytest.mark.slow
@pytest.mark.parametrize("title", BUGS)
def test_bugs_of_a_contrastive_loss(title, tmp_path):
    name, level, *_ = title.replace(",", "").split()
    states, output, status = check(
        START + CONTRASTIVE.replace(*BUGS[title]), tmp_path
    )
    assert names(states, "error", "warning", "advice") == {name}, output
    assert (states[name], status) == (level, level == "error"), output


@pytest.mark.slow
def test_weights_of_samples(tmp_path):
    """Weights that change from step to step may be those of samples."""
    loss = "criterion.weight = torch.rand(4 * world_size)\n    loss = criterion("
    script = START + CONTRASTIVE.replace("loss = criterion(", loss)
    states, output, status = check(script, tmp_path)
    assert status == 0 and not names(states, "error", "warning", "advice"), output
