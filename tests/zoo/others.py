"""Networks for text, series, tables and several inputs, and some that attacks find hard."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH = 30, 6


class RecurrentText(nn.Module):
    """Token ids, an embedding, an LSTM or GRU, and the class of the last state."""

    def __init__(self, layer: type[nn.RNNBase], classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.rnn, self.head = layer(8, 10, batch_first=True), nn.Linear(10, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(input_ids))
        return self.head(states[:, -1])


class RecurrentSeries(nn.Module):
    """A series with time first, two layers, both directions."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.rnn = nn.LSTM(channels, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


def series_cnn(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(channels, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(8, 8, 3),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, classes),
    )  # fmt: skip


def audio_cnn() -> nn.Module:
    """Raw samples, a long stride first, as in M5."""
    return nn.Sequential(
        nn.Conv1d(1, 8, 8, stride=4), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.Tanh(),
        nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class EmbeddedColumns(nn.Module):
    """A table whose categorical columns are ids of an embedding, beside numeric ones."""

    def __init__(self, categories: int, columns: int, numbers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(categories, 3)
        self.layers = nn.Sequential(nn.Linear(3 * columns + numbers, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        return self.layers(torch.cat([numbers, self.embedding(ids).flatten(1)], 1))


class ImageAndMeta(nn.Module):
    """An image and a vector beside it."""

    def __init__(self, meta: int, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.Sigmoid(), nn.Flatten())
        self.head = nn.Linear(6 * 7 * 7 + meta, classes)

    def forward(self, image: Tensor, meta: Tensor) -> Tensor:
        return self.head(torch.cat([self.features(image), meta], 1))


class Wrapped(nn.Module):
    """A network whose output comes in another form."""

    def __init__(self, network: nn.Module, form: str) -> None:
        super().__init__()
        self.network, self.form = network, form

    def forward(self, x: Tensor) -> Any:
        out = self.network(x)
        return {"logits": out, "features": x.flatten(1)} if self.form == "dict" else (out, x.mean())


class Tiny(nn.Module):
    """A small convolutional classifier. `width` 1: a single logit."""

    def __init__(self, outputs: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.dropout = nn.Conv2d(3, 6, 5, stride=2), nn.Dropout(dropout)
        self.head = nn.Linear(6 * 6 * 6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.sigmoid(self.conv(x)).flatten(1)))


class Branches(Tiny):
    """Asks for a value in Python: vmap rejects it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.mean().item() > 0.7 else 1.0)


class _Legacy(torch.autograd.Function):
    """As most people write it: torch.func does not take it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return grad * (1 - output**2)


class _Once(torch.autograd.Function):
    """A kernel with a backward of its own that cannot be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return grad * (1 - output**2)


class OwnKernel(Tiny):
    """`once`: torch.func takes it, and takes its backward for a constant."""

    def __init__(self, outputs: int = 4, once: bool = False) -> None:
        super().__init__(outputs)
        self.function = _Once if once else _Legacy

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(self.conv(x)).flatten(1))


class Autoencoder(nn.Module):
    def __init__(self, entries: int = 3 * 8 * 8) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(entries, 12), nn.Linear(12, entries)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x.flatten(1)))).view_as(x)


def contrastive(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Pull an embedding towards the vector of its partner, as two-tower models do."""
    scores = F.normalize(output, dim=1) @ F.normalize(batch["partner"], dim=1).T
    return F.softplus(-scores.diagonal()).mean() + 0.1 * scores.square().mean()
