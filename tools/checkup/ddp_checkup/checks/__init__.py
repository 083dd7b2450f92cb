"""All checks, in the order of the report: what a DDP script has to keep."""

from ddp_checkup.checks import data, output, training
from ddp_checkup.checks.verdicts import Check

CHECKS = [
    value
    for module in (training, data, output)
    for value in vars(module).values()
    if isinstance(value, Check)
]
