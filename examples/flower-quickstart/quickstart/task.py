"""Model, data and training in plain PyTorch: nothing here knows of Flower, or of an audit."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradleak as gl  # 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 14 * 14, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


def load_data(partition: int, partitions: int) -> DataLoader:
    images = gl.data.load("mnist-samples")  # 20 real digits, so that the example needs no download
    rows = torch.arange(partition, len(images), partitions)
    return DataLoader(TensorDataset(images.x[rows], images.y[rows]), batch_size=4, shuffle=True)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimiser.step()
            total += loss.item()
    return total / (epochs * len(loader))


# 2: what an audit has to know of the model. It holds no data.
task = gl.Task.supervised(Net(), nn.functional.cross_entropy, like=(torch.zeros(1, 1, 28, 28), torch.zeros(1).long()))
