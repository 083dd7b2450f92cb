"""Batches from files that no process holds in memory as a whole."""

from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from common.errors import UserError


class ShardStream(IterableDataset):
    """Yields this rank's batches: (tokens, next tokens), both (batch_size, length).

    sequences: their number per epoch, on all ranks. The files hold tokens, uint8
    (n,). Every epoch shuffles the files, and the sequences within a file. Sequences
    at the end of a file that do not fill a batch are dropped. Raises UserError if
    files are missing or too small, or cannot be shared equally.
    """

    def __init__(self, folder, sequences, length, batch_size, workers, seed):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.batches = sequences // (batch_size * self.world_size)  # per rank
        self.epoch = self.first = 0
        self.files = sorted(folder.glob("shard*.npy"))
        sizes = {np.load(file, mmap_mode="r").size for file in self.files}
        if len(sizes) != 1:
            problem = f"no shards of one size in {folder}"
            raise UserError(f"{problem}: run `python write_shards.py`")
        readers = self.world_size * max(1, workers)
        if len(self.files) % readers:
            raise UserError(
                f"{readers} readers (ranks times --workers) cannot share "
                f"{len(self.files)} shards equally: use other --workers, or run "
                f"`python write_shards.py --shards {readers}`"
            )
        self.per_file = (sizes.pop() - 1) // length  # sequences
        most = self.per_file // batch_size * len(self.files) * batch_size
        if not batch_size * self.world_size <= sequences <= most:
            raise UserError(
                f"the shards have {most} sequences of {length} tokens in whole "
                f"batches of {batch_size}: use other --sequences or --batch-size"
            )

    def set_epoch(self, epoch, first=0):
        """Choose the order of an epoch; first: the batch to begin with."""
        self.epoch, self.first = epoch, first

    def __len__(self):
        return self.batches - self.first

    def __iter__(self):
        info = get_worker_info()  # of this worker; None in the main process
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        # The loader takes batches from its workers in turn, starting with worker 0.
        # If batches are skipped, worker 0 must act as the one whose turn is next.
        worker = (number + self.first) % workers
        skipped = len(range(worker, self.first, workers))  # batches, not read
        last = len(range(worker, self.batches, workers))
        reader = self.rank * workers + worker
        for tokens, starts in islice(self.plan(reader, workers), skipped, last):
            index = starts[:, None] + np.arange(self.length + 1)
            sequences = torch.from_numpy(tokens[index]).long()
            # Not views of one tensor: those would not be copied from pinned memory.
            yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def plan(self, reader, workers):
        """Yield (a file's tokens, where each sequence of a batch starts)."""
        rng = np.random.default_rng([self.seed, self.epoch])  # same on all ranks
        files = rng.permutation(self.files)
        for number in range(reader, len(files), self.world_size * workers):
            tokens = np.load(files[number], mmap_mode="r")
            rng = np.random.default_rng([self.seed, self.epoch, number])
            starts = rng.permutation(self.per_file) * self.length
            for i in range(0, self.per_file - self.batch_size + 1, self.batch_size):
                yield tokens, starts[i : i + self.batch_size]
