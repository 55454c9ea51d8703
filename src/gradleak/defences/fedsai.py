"""FedSAI: FedSAM from weights that the server trained beforehand, with SAM, on public images."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.fedsam import FedSAM
from gradleak.defences.settings import at_least
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch, Classifier, Field, Supervised, Task, TaskError

PAPER = (
    "Sharpness-aware initialisation (SAI): Wang, Zhu, Zhou, Zhang, Wang, Tang, USENIX Security 2025, there for "
    "differentially private training; before FedSAM it is a published defence against gradient leakage"
)


class PublicImages(Protocol):
    """Labelled images in [0, 1], such as `gradleak.data.Images`: x (N, channels, height, width), y (N,)."""

    @property
    def x(self) -> Tensor: ...

    @property
    def y(self) -> Tensor: ...

    @property
    def classes(self) -> int: ...


@named("fedsai", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class FedSAI(FedSAM):
    """Before round 0 the server trains the features with SAM on public images; then clients train as in FedSAM.

    public         the server's images: a name for `gradleak.data.load`, whose images are resized for the task, or
                   `gradleak.data.Images` of the right size
    images         the most images of a named set, class by class in turn; None: all
    epochs, batch_size, lr, weight_decay   of that training, plain SGD with FedSAM's rho

    The classifier is replaced by one for the public classes (with torch's usual initial weights), and the task's own is
    put back afterwards, untrained. All other weights, and BatchNorm's statistics, are those at the end of the training.
    The model trains in its current mode, training or evaluation.

    No private image is used, so this costs clients no privacy. It hides nothing either: a round leaks as much as a
    round of FedSAM at these weights, and A2 replays it. Only the weights differ, and a check demands that they do.

    Differs: learning rate, decay and optimiser of the pre-training are not published; here they are the training's.
    """

    public: str | PublicImages = "cifar100"
    images: int | None = 10_000
    epochs: int = 5
    batch_size: int = 64
    lr: float = 0.01
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_size"):
            at_least(name, getattr(self, name), 1, whole=True)
        if self.images is not None:
            at_least("images", self.images, 1, whole=True)
        at_least("lr", self.lr, 0.0, excluded=True)
        at_least("weight_decay", self.weight_decay, 0.0)

    def demand(self, task: Task, server: Tree) -> None:
        _head(task)
        self._examples(task, server)

    def initial(self, weights: Params, server: Tree) -> Params:
        if "task" not in server:
            raise ValueError(
                "FedSAI trains the task's model before round 0: initial(..., server) needs server['task']."
            )
        task: Task = server["task"]
        key = server.get("key", randomness.key("fedsai"))
        generator = torch.Generator().manual_seed(int(key[0]))
        head, (batch, classes) = _head(task), self._examples(task, server)
        other = _with_classes(task, head, classes, generator)
        features = {name for name in weights if name not in (head.weight, head.bias)}
        start = {name: weights[name] if name in features else value for name, value in other.weights().items()}
        training = LocalTraining(
            self.lr, epochs=self.epochs, batch_size=self.batch_size, optimiser=SGD(weight_decay=self.weight_decay)
        )
        order = training.order(len(batch["x"]), generator)
        upload, after = training.run(
            other, start, batch, FedSAM(self.rho), ClientState(buffers=other.buffers()), order=order
        )
        update = upload.payload["update"]
        trained = {name: value - update[name] if name in features else value for name, value in weights.items()}
        self._demand_change({name: weights[name] for name in features}, trained)
        running = {name for name, _ in task.model.named_buffers()}
        statistics = {name: value for name, value in (after.buffers or {}).items() if name in running}
        return tree.detach({**trained, **statistics})

    def _examples(self, task: Task, server: Tree) -> tuple[Batch, int]:
        """The public images in model-input space, and the number of their classes."""
        shape = task.fields["x"].shape
        images = self.public
        if isinstance(images, str):
            if "load" not in server:
                raise ValueError(
                    f"FedSAI was given the name {images!r} and nothing that loads it: give the images themselves, "
                    "FedSAI(public=gradleak.data.load(...)), or server['load']."
                )
            images = server["load"](images, size=shape[1:], limit=self.images)
        grey = images.x.shape[1] == 1  # the task may want colour
        x = images.x.expand(-1, shape[0], -1, -1) if grey else images.x
        if tuple(x.shape[1:]) != shape:
            raise TaskError(
                f"FedSAI's public images have shape {tuple(x.shape[1:])}; the task's have {shape}: load them with "
                "size=, or choose others."
            )
        like = next(task.model.parameters())
        pixels = x.to(like.device, like.dtype)
        return {"x": task.fields["x"].model(pixels), "y": images.y.to(like.device)}, images.classes

    def _demand_change(self, before: Params, after: Params) -> None:
        if not tree.finite(after):
            raise ValueError(f"FedSAI's pre-training diverged with lr={self.lr:g}: choose a smaller one.")
        if all(torch.equal(value, after[name]) for name, value in before.items()):
            raise ValueError(
                f"FedSAI's pre-training left every weight below the classifier as it was (lr={self.lr:g}): this would "
                "be FedSAM. The units may be dead, or the rate below the weights' precision."
            )


def _head(task: Task) -> Classifier:
    """The linear layer that makes the logits."""
    image = task.fields.get("x")
    if image is None or len(image.shape) != 3:
        raise TaskError(
            "FedSAI pre-trains on public images: the task needs a field x of shape (channels, height, width)."
        )
    try:
        head = task.classifier
    except TaskError:
        head = None
    if head is None or not head.module:
        what = "there is nothing below it" if head else "none was found among the model's nn.Linear layers"
        raise TaskError(
            f"FedSAI replaces the classifier for the public classes, and {what}. Pre-train such a model yourself and "
            "use FedSAM: the models of gradleak.models, and any whose logits come from an nn.Linear, work."
        )
    return head


def _with_classes(task: Task, head: Classifier, classes: int, generator: torch.Generator) -> Task:
    """The task with other classes: a copy of the model with a new classifier."""
    model = copy.deepcopy(task.model)
    parent, _, last = head.module.rpartition(".")
    old = model.get_submodule(head.module)
    assert isinstance(old, nn.Linear)  # by `Task.classifier`
    new = nn.Linear(old.in_features, classes, bias=old.bias is not None, device="meta").to_empty(device="cpu")
    for parameter in new.parameters():
        nn.init.uniform_(parameter, -(old.in_features**-0.5), old.in_features**-0.5, generator=generator)
    setattr(model.get_submodule(parent), last, new.to(old.weight.device, old.weight.dtype))
    return Task(model, Supervised(cross_entropy), {"x": task.fields["x"], "y": Field((), classes=classes)})
