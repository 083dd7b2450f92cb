"""Write the files for streaming.py, to DATADIR/sequences or data/sequences."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from common.data import data_dir
from common.errors import run
from dataset import random_sequences


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=16, help="files")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per file")
    args = parser.parse_args()
    folder = data_dir("sequences")
    folder.mkdir(parents=True, exist_ok=True)
    rows = random_sequences(args.shards, args.tokens + 1).images
    with TemporaryDirectory(dir=folder) as new:  # the old ones stay if this fails
        for i, tokens in enumerate(rows.to(torch.uint8)):  # 256 different tokens
            np.save(f"{new}/shard{i:03}.npy", tokens.numpy())
        for old in folder.glob("shard*.npy"):
            old.unlink()
        for file in Path(new).iterdir():
            file.rename(folder / file.name)
    print(f"{args.shards} shards of {args.tokens} tokens in {folder}")


if __name__ == "__main__":
    run(main)
