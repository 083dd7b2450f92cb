"""All checks, in the order of the report."""

from ddp_checkup.checks import (  # noqa: I001  this order is that of the report
    replicas,
    buffers,
    data,
    evaluation,
    randomness,
    output,
)
from ddp_checkup.checks.findings import CHECKS

MODULES = replicas, buffers, data, evaluation, randomness, output

__all__ = ["CHECKS", "MODULES"]
