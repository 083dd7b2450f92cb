"""All checks, in the order of the report: what a DDP script has to keep."""

from ddp_checkup.checks import (
    copies,
    data,
    evaluation,
    losses,
    output,
    randomness,
    training,
)
from ddp_checkup.checks.verdicts import Check

MODULES = training, losses, copies, data, randomness, evaluation, output
CHECKS = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, Check) and value.function.__module__ == module.__name__
]
