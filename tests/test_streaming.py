"""beyond_ddp/'s stream of shards: each sequence once, in a new order each epoch."""

import shutil
from functools import partial
from unittest.mock import Mock

import conftest
import numpy as np
import pytest
import torch
from conftest import call, raises_user_error
from test_beyond import check_losses, start, train_alone
from torch.utils.data import DataLoader

load = partial(conftest.load, "beyond_ddp")


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Write 16 files of 8 sequences of 16 tokens; return what makes a stream."""
    folder, module = tmp_path / "sequences", load("data_stream")
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(256, size=(16, 129), dtype=np.uint8)
    for i in range(16):
        np.save(folder / f"shard{i:02}.npy", tokens[i])

    def stream(rank, workers, sequences=128, batch=4):
        monkeypatch.setattr(module.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
        return module.ShardStream(folder, sequences, 16, batch, workers, seed=0)

    return stream


def batches(stream, workers, epoch=1, first=0):
    stream.set_epoch(epoch, first)
    found = list(DataLoader(stream, None, num_workers=workers))
    assert len(found) == len(stream)
    return found


@pytest.mark.parametrize("workers, sequences", [(0, 128), (2, 128), (2, 40)])
def test_each_sequence_is_read_once(workers, sequences, shards):
    """By one worker of one rank; 40 are some of them."""
    seen = []
    for rank in range(2):
        for tokens, targets in batches(shards(rank, workers, sequences), workers):
            assert tokens.shape == targets.shape == (4, 16)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            seen += map(tuple, tokens.tolist())
    assert len(seen) == sequences and len(set(seen)) == len(seen)


def test_each_epoch_has_another_order(shards, tmp_path):
    """Of the files, and of the sequences in a file."""

    def epochs(stream):
        found = [batches(stream, 0, epoch) for epoch in (1, 2, 1)]
        return [torch.cat([tokens for tokens, _ in epoch]) for epoch in found]

    one, two, again = epochs(shards(0, 0, 64))
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert {*map(tuple, one.tolist())} != {*map(tuple, two.tolist())}
    first, *others = (tmp_path / "sequences").iterdir()
    for file in others:  # equal files: their order does not show
        shutil.copy(first, file)
    one, two, _ = epochs(shards(0, 0, 128))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("workers, first", [(0, 6), (2, 1), (2, 6)])
def test_a_stream_continues_in_an_epoch(workers, first, shards):
    stream = shards(1, workers)
    whole, rest = batches(stream, workers), batches(stream, workers, first=first)
    assert len(rest) == 16 - first
    for one, other in zip(rest, whole[first:], strict=True):
        assert torch.equal(one[0], other[0])


def test_shards_that_do_not_suffice(shards, tmp_path):
    with raises_user_error("6 readers .* cannot share 16 shards .*--shards 6`"):
        shards(0, 3)
    with raises_user_error("the shards have 128 sequences of 16 tokens"):
        shards(0, 0, 132)
    shutil.rmtree(tmp_path / "sequences")
    with raises_user_error("no shards of one size in .*write_shards.py"):
        shards(0, 0)


def test_shards_are_replaced_as_a_whole(tmp_path, monkeypatch):
    """A full disk leaves the old ones."""
    monkeypatch.setenv("DATADIR", str(tmp_path))
    module, folder = load("write_shards"), tmp_path / "sequences"
    call(module, "--shards=3", "--tokens=100")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(np, "save", Mock(side_effect=[None, OSError("disk full")]))
        call(module, "--shards=2", "--tokens=200")
    assert [len(np.load(file)) for file in folder.iterdir()] == [101] * 3
    call(module, "--shards=2", "--tokens=200")
    assert [len(np.load(file)) for file in folder.iterdir()] == [201] * 2


def test_streaming_has_the_losses_of_one_process(shards, tmp_path):
    """Which sees in each step what the streams of two ranks give."""
    run = start(tmp_path, "streaming", "--epochs=2", "--workers=2")
    streams = [shards(rank, 2, 48, batch=6) for rank in range(2)]
    epochs = []
    for epoch in (1, 2):
        of_ranks = [batches(stream, 2, epoch) for stream in streams]
        steps = [zip(*parts, strict=True) for parts in zip(*of_ranks, strict=True)]
        epochs.append([[*map(torch.cat, step)] for step in steps])
    torch.manual_seed(0)
    model = load("streaming").Transformer(2, 32, 4, 16)
    check_losses(run.results(), train_alone(model, epochs))
