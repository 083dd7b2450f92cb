"""Which stages of a pipeline a GPU has, and in which order it works on them."""

from functools import partial

from torch.distributed.pipelining import schedules

from common.cli import UserError

SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}  # stages of each GPU


def stage_numbers(args, rank, gpus):
    """Return the numbers of the stages of this rank, and how many there are in all.

    args: the options of pipeline.py. With two stages each, the data goes round all
    GPUs twice. Raises UserError if there are more stages than layers, if a batch or
    the data cannot be cut evenly (a pipeline is built for pieces of one size only),
    if there are too few pieces for 1F1B, or if interleaving cannot deal them out to
    the GPUs in turns.
    """
    count, pieces = gpus * SCHEDULES[args.schedule], args.micro_batches
    batch, sequences = args.batch_size * gpus, args.sequences
    if args.layers < count:
        raise UserError(f"{count} stages need as many layers: use --layers {count}")
    if batch % pieces:
        raise UserError(
            f"a batch of {batch} cannot be cut into {pieces} micro-batches: use "
            f"--batch-size {pieces}"
        )
    if sequences % batch:
        raise UserError(
            f"the last batch would have {sequences % batch} sequences, not {batch}: "
            f"use --sequences {batch * -(-sequences // batch)}"
        )
    if args.schedule == "1F1B" and pieces < gpus:
        raise UserError(
            f"1F1B needs a micro-batch for each of {gpus} stages: use "
            f"--micro-batches {gpus}, or --schedule GPipe"
        )
    if count > gpus and pieces % gpus:
        raise UserError(
            f"{args.schedule} deals out micro-batches to {gpus} GPUs in turns: use "
            f"--micro-batches {gpus * -(-pieces // gpus)}"
        )
    return range(rank, count, gpus), count


def make_schedule(stages, loss_fn, args):
    """Return a schedule of torch.distributed.pipelining, whose step() does a batch.

    stages: this rank's PipelineStages; loss_fn: of the last one's output and its
    targets, a mean. So the batch's loss is the mean of its micro-batches'.
    """
    kind = schedules.get_schedule_class(args.schedule)
    work = stages if SCHEDULES[args.schedule] > 1 else stages[0]
    schedule = kind(work, args.micro_batches, loss_fn=loss_fn)
    if not stages[0].is_first:  # PyTorch 2.8 refuses tokens that it has no use for
        schedule.step = partial(without_tokens, schedule.step)
    return schedule


def without_tokens(step, tokens, **others):
    return step(**others)
