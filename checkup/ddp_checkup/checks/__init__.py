"""All checks, in the order of the report: what a DDP script has to keep."""

from ddp_checkup.checks import replicas, buffers, data, output  # noqa: F401, I001
from ddp_checkup.checks.findings import CHECKS

__all__ = ["CHECKS"]
