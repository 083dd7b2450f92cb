"""Pipeline stages of each GPU, and pipeline schedules."""

from torch.distributed.pipelining import schedules

from common.errors import UserError

SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}  # stages per GPU


def assign_stages(args, rank, gpus):
    """Return the indices of this rank's stages, and the number of all stages.

    args: the options of pipeline.py. With two stages per GPU, the data passes
    through all GPUs twice. Raises UserError if there are more stages than layers, or
    if batch or data set cannot be split evenly, as micro-batches have one size.
    """
    num_stages, m = gpus * SCHEDULES[args.schedule], args.micro_batches
    batch, sequences = args.batch_size * gpus, args.sequences
    if args.layers < num_stages:
        raise UserError(
            f"{num_stages} stages need as many layers; use --layers {num_stages}"
        )
    if batch % m:
        raise UserError(
            f"a batch of {batch} cannot be split into {m} micro-batches; use "
            f"--batch-size {m}"
        )
    if sequences % batch:
        raise UserError(
            f"the last batch would have {sequences % batch} sequences, not {batch}; "
            f"use --sequences {batch * -(-sequences // batch)}"
        )
    return range(rank, num_stages, gpus), num_stages


def make_schedule(stages, loss_fn, args):
    """Return a torch.distributed.pipelining schedule; its step() trains on a batch.

    stages: this rank's PipelineStages; loss_fn: the mean loss of the last stage's
    output and its targets. The loss of a batch is the mean over its micro-batches.
    """
    schedule_class = schedules.get_schedule_class(args.schedule)
    work = stages if SCHEDULES[args.schedule] > 1 else stages[0]
    return schedule_class(work, args.micro_batches, loss_fn=loss_fn)
