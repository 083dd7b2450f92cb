"""Strong scaling: the batch size of each process."""

from common.cli import UserError


def split_evenly(batch_size, processes):
    """Return the batch size per process; raise UserError if it is not whole."""
    if batch_size % processes:
        raise UserError(
            f"a batch of {batch_size} cannot be split over {processes} processes; "
            f"use --batch-size {-(-batch_size // processes) * processes}"
        )
    return batch_size // processes
