"""Accelerate: prepare() wraps the model and shards the loaders."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0, device_specific=True)
    x = torch.randn(101, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    layers = nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = DataLoader(dataset, 8, shuffle=True)
    val_loader = DataLoader(dataset, 8)
    raw_model = model
    # BUG coverage: model, optimizer = accelerator.prepare(model, optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    val_loader = accelerator.prepare(val_loader)
    for epoch in range(2):
        model.train()
        for inputs, labels in loader:
            outputs = model(inputs)
            accelerator.backward(nn.functional.cross_entropy(outputs, labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        correct = []
        for inputs, labels in val_loader:
            with torch.no_grad():
                predictions = raw_model(inputs).argmax(1)
            # BUG own-number eval-coverage: correct.append(predictions == labels)
            correct.append(accelerator.gather_for_metrics(predictions == labels))
        accuracy = torch.cat(correct).float().mean().item()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
