"""The model, what it is trained on, and how: shared by clients, server and auditor."""

import torch

import gradleak as gl

DATA = "digits"  # 1,797 real handwritten digits of 8 x 8 pixels, that come with scikit-learn; put your own loading here
CLIENTS = 1500  # of them are the clients', the rest is nobody's


def network() -> torch.nn.Module:
    """The LeNet of DLG; always the same weights at the start."""
    return gl.models.lenet_zhu(shape=(1, 8, 8), generator=torch.Generator().manual_seed(0))


def task() -> gl.Task:
    """What an audit has to know of the training. It holds no data: `like` gives shapes."""
    like = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(network(), torch.nn.functional.cross_entropy, like=like)


def recipe(lr: float) -> gl.LocalTraining:
    """What a client does in a round: one step on its examples."""
    return gl.LocalTraining(lr=lr)


def examples(partition: int, partitions: int, count: int, server_round: int) -> gl.Batch:
    """The examples of a client in a round: its share of the data, `count` of them in turn."""
    images = gl.data.load(DATA)
    mine = torch.arange(partition, CLIENTS, partitions)
    rows = mine[(torch.arange(count) + (server_round - 1) * count) % len(mine)]
    return {"x": images.x[rows], "y": images.y[rows]}


def others() -> gl.data.Images:
    """Real images that are no client's: among these the audit looks reconstructions up, and takes its baseline."""
    return gl.data.load(DATA)[torch.arange(CLIENTS, CLIENTS + 200)]
