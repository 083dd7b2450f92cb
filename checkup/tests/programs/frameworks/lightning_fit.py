"""Lightning: the Trainer starts the process group, wraps and shards."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2)
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        accuracy = (self.layers(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

    def on_train_start(self):
        torch.manual_seed(self.global_rank)

    def on_train_end(self):
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), "final.pt")


def main():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    options |= {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    # BUG coverage: options["use_distributed_sampler"] = False
    options["num_sanity_val_steps"] = 0
    trainer = L.Trainer(**options)
    L.seed_everything(0)
    loader = DataLoader(dataset, 8, shuffle=True)
    trainer.fit(Model(), loader, DataLoader(dataset, 8))


if __name__ == "__main__":
    main()
