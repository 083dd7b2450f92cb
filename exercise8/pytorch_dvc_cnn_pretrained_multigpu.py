"""DDP: one process per GPU, which trains on its shard of the photos.

    sbatch run.sh pytorch_dvc_cnn_pretrained.py                   # one GPU
    sbatch run-2gpus.sh pytorch_dvc_cnn_pretrained_multigpu.py    # DDP, two GPUs
    sbatch run.sh pytorch_dvc_cnn_pretrained_largedata.py         # 22,000 photos
    sbatch run-2gpus.sh pytorch_dvc_cnn_pretrained_largedata_multigpu.py
    sbatch run-2gpus.sh solutions/strong_scaling.py               # strong scaling

Trains a new head, then fine-tunes the last convolutional block. Without a GPU, the
run script adds the options in small.txt: a small model and few epochs.
"""

import argparse
import time

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.utils.data import DistributedSampler, Subset  # DDP: shards of the data

from backbones import BACKBONES, WEIGHT_SETS, load_features
from common.data import make_loader, normalise
from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, STD, augment, dogs_vs_cats


class Classifier(nn.Module):
    """A pretrained backbone and a new head: a logit per image, positive for dogs."""

    def __init__(self, backbone, weights):
        super().__init__()
        self.features = load_features(backbone, weights)
        channels = self.features[28].out_channels  # last convolution; VGG16: 512
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * 4 * 4, 64),  # 150 pixels halved five times: 4
            nn.ReLU(),
            nn.Linear(64, 1),
        )

    def forward(self, images):
        return self.head(self.features(images)).flatten()


criterion = nn.BCEWithLogitsLoss()


def train(model, batches, optimizer, device):
    """Train for one epoch; return {"loss": mean, "accuracy": %}."""
    model.train()
    sums = torch.zeros(3, device=device)  # losses, correct answers, images
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(augment(normalise(images, MEAN, STD)))
        loss = criterion(output, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums += batch_sums(loss, (output > 0) == (labels > 0))
    dist.all_reduce(sums)  # DDP: the sum over all ranks
    return to_metrics(sums, check_finite=True)


@torch.no_grad()
def evaluate(model, batches, device):
    """Return {"loss": mean, "accuracy": %}."""
    model.eval()
    sums = torch.zeros(3, device=device)  # losses, correct answers, images
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        sums += batch_sums(criterion(output, labels), (output > 0) == (labels > 0))
    dist.all_reduce(sums)  # DDP: the sum over all ranks
    return to_metrics(sums)


def fit(model, loaders, optimizer, epochs, device, log):
    """Train and validate for these epochs; return the elapsed seconds."""
    train_loader, val_loader = loaders
    # DDP: copies rank 0's weights, averages gradients of the layers trainable now
    ddp_model = DDP(model)
    start = time.perf_counter()
    for epoch in epochs:
        train_loader.sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        epoch_start = time.perf_counter()
        batches = log.progress(train_loader, "training")
        # DDP: train with the wrapper, which averages gradients
        train_metrics = train(ddp_model, batches, optimizer, device)
        seconds = time.perf_counter() - epoch_start
        val_metrics = evaluate(model, log.progress(val_loader, "validation"), device)
        images = len(train_loader.dataset)
        log.epoch(
            epoch, images, seconds, train=train_metrics, validation=val_metrics
        )
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive, default=10, help="epochs")
    parser.add_argument(
        "--finetune-epochs", type=int, default=20, help="fine-tuning epochs"
    )
    parser.add_argument("--batch-size", type=int, default=25, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument(
        "--backbone", choices=BACKBONES, default="vgg16", help="pretrained model"
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHT_SETS,
        default="pretrained",
        help="initial weights",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.set_float32_matmul_precision("high")  # allow TF32, as convolutions do
    torch.manual_seed(args.seed + rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set, val_set, test_set = dogs_vs_cats()
    model = Classifier(args.backbone, args.weights)
    model = model.to(device, memory_format=torch.channels_last)
    model.features.requires_grad_(False)  # frozen until fine-tuning, below
    log = RunLog(args, device, model, enabled=rank == 0)  # DDP: only rank 0 logs
    log.print(f"Images found to train on: {len(train_set)}")
    log.print(f"Images found to validate on: {len(val_set)}")
    log.print(f"Images found to test on: {len(test_set)}")

    # DDP: each rank trains on its own shard, and evaluates every world_size-th image
    sampler = DistributedSampler(train_set, seed=args.seed)
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    test_set = Subset(test_set, range(rank, len(test_set), world_size))
    train_loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_loader = make_loader(val_set, args.batch_size, device)
    test_loader = make_loader(test_set, args.batch_size, device)

    # Train the new head.
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    epochs = range(1, args.epochs + 1)
    loaders = train_loader, val_loader
    training_seconds = fit(model, loaders, optimizer, epochs, device, log)
    log.print(f"Total training time: {training_seconds:.1f} s")
    accuracy = evaluate(model, log.progress(test_loader, "test"), device)["accuracy"]
    log.print(f"Testing (pretrained, before fine-tuning): accuracy {accuracy:.2f} %")

    # Fine-tune: train the last convolutional block as well.
    model.features[24:].requires_grad_(True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5)
    epochs = range(args.epochs + 1, args.epochs + args.finetune_epochs + 1)
    tuning_seconds = fit(model, loaders, optimizer, epochs, device, log)
    log.print(f"Total fine-tuning time: {tuning_seconds:.1f} s")
    accuracy = evaluate(model, log.progress(test_loader, "test"), device)["accuracy"]
    log.print(f"Testing (pretrained, after fine-tuning): accuracy {accuracy:.2f} %")
    log.write_result(accuracy, training_seconds)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
