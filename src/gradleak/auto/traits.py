"""The traits of a case: what a server can tell of an observation before it attacks. Only they decide who runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from gradleak.attack import too_many
from gradleak.attack.cascade import given_of
from gradleak.attacks.analytic import input_layer
from gradleak.attacks.second_order import orders_of
from gradleak.attacks.second_order.smoothing import kinked
from gradleak.attacks.spans import Span, SparseSpan, ViT
from gradleak.attacks.spans.norms import training_norms
from gradleak.attacks.spans.sparse.layers import sparse_layer
from gradleak.attacks.spans.telling import tells
from gradleak.core import tree
from gradleak.engine import Engine, memory_of, unknowns_of
from gradleak.generators import Generator
from gradleak.parts.embedded import unembedded
from gradleak.parts.levenberg import LevenbergMarquardt
from gradleak.scenario.client import Order
from gradleak.scenario.defence import OnlyVisible
from gradleak.scenario.fit import fits
from gradleak.scenario.forms import AttackerForm, hides_entries
from gradleak.scenario.kinds import Table
from gradleak.scenario.observation import Knowledge, Track
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Task, TaskError

SEARCHED = 2 * 3 * 64**2  # numbers of two images whose search off a vision transformer takes minutes, not hours
NEARLY, MOSTLY = 0.01, 0.9  # signs: nine in ten entries have nearly the same size, which those of a gradient never do
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, eq=False)
class Case:
    """Task, observations and knowledge, with the traits that attacks depend on. Nothing here is private."""

    task: Task
    targets: tuple[Track, ...]
    knows: Knowledge
    engine: Engine

    def __post_init__(self) -> None:
        fits(self.task, [observation for target in self.targets for observation in target.observations])

    @property
    def denoiser(self) -> bool:
        """Do clients draw a step and noise for every example?"""
        return {"t", "noise"} <= self.task.drawn

    @property
    def numeric(self) -> bool:
        """Are examples numbers that a gradient moves (images, series, tables), and no denoiser's?"""
        return "x" in self.task.fields and self.task.fields["x"].continuous and not self.denoiser

    @property
    def table(self) -> bool:
        """Are examples rows of a table, with labels?"""
        return {"x", "y"} <= self.task.fields.keys() and isinstance(self.task.fields["x"].kind, Table)

    @cached_property
    def text(self) -> bool:
        """Are examples texts, whose tokens a model embeds?"""
        return not unembedded(self.task)

    @cached_property
    def smooth(self) -> bool:
        return not kinked(self.task)

    @cached_property
    def normed(self) -> bool:
        """Does the network hold BatchNorm statistics?"""
        return any(isinstance(module, _NORMS) for module in self.task.model.modules())

    @cached_property
    def linear_first(self) -> bool:
        """Does a biased linear layer see the input itself?"""
        try:
            input_layer(self.task)
        except TaskError:
            return False
        return True

    @cached_property
    def relu_first(self) -> bool:
        """Does a biased linear layer see the input itself, and a ReLU its output?"""
        return self._before_relu(first=True)

    @cached_property
    def relu_head(self) -> bool:
        """Does a biased linear layer see features of an image, one row for each example, and a ReLU its output?"""
        return self._before_relu(first=False)

    def _before_relu(self, first: bool) -> bool:
        return not SparseSpan().refuses(self.task, self.knows.given) and sparse_layer(self.task).first == first

    @cached_property
    def patched(self) -> bool:
        """Does a vision transformer cut the images of every target into patches that its gradient tells?"""
        if not self.numeric or ViT().refuses(self.task, self.knows.given):
            return False
        if self.examples == 1:
            return True
        training = self.knows.training  # two images need the size of the gradient
        few = self.unknowns <= SEARCHED
        return few and training is not None and not too_many(ViT(), self.examples, self.task, training)

    @cached_property
    def mapped(self) -> bool:
        """Does the gradient of a convolution tell the maps of images, for as many as the largest target holds?"""
        if not (self.numeric and self.gradients) or Span().refuses(self.task, self.knows.given):
            return False
        if training_norms(self.task.model):  # their statistics are read off what came back after one step
            back = all(each.returned_buffers for target in self.targets for each in target.observations)
            if not back or (self.steps or 1) != 1:
                return False
        return tells(self.task, self.examples)

    @property
    def gradients(self) -> bool:
        """May the update be a sum of gradients, as SGD makes it?"""
        return self.knows.training is None or isinstance(self.knows.training.optimiser, SGD)

    @property
    def steps(self) -> int | None:
        """The most local steps of any target's client; None: the threat model does not grant the recipe."""
        training = self.knows.training
        return None if training is None else max(len(training.order(each.num_examples)) for each in self.targets)

    @property
    def single(self) -> bool:
        """May the update be one gradient?"""
        return self.steps in (None, 1)

    @property
    def examples(self) -> int:
        """The most examples of any target."""
        return max(each.num_examples for each in self.targets)

    @property
    def step_rule(self) -> str:
        """How a denoiser's steps are found: read off one gradient, or searched for where several gradients add up."""
        return "analytic" if self.single else "soft"

    @property
    def several(self) -> bool:
        """May the update be the sum of several steps?"""
        return self.steps is None or self.steps > 1

    @cached_property
    def signs(self) -> bool:
        """Is the update little more than signs, as from an optimiser that divides by the gradient's size?"""
        sizes = tree.flatten(self.targets[0].last.update).abs().double()
        sizes = sizes[sizes > 0]
        return len(sizes) > 0 and float(((sizes / sizes.median() - 1).abs() < NEARLY).double().mean()) > MOSTLY

    @property
    def aggregate(self) -> bool:
        """Is the observation the sum of several clients' uploads?"""
        return any(observation.clients > 1 for target in self.targets for observation in target.observations)

    @cached_property
    def forms(self) -> tuple[AttackerForm, ...]:
        """The forms that an attacker with this knowledge can take and that differ, the most informed first.

        An attacker who knows more is free to use less.
        """
        defence = self.knows.defence
        if defence is None:
            return (AttackerForm.NAIVE,)
        if isinstance(defence, OnlyVisible):
            return AttackerForm.MASKED, AttackerForm.NAIVE
        masked = (AttackerForm.MASKED,) if hides_entries(defence) else ()
        return AttackerForm.ADAPTIVE, *masked, AttackerForm.NAIVE

    def taking(self, form: AttackerForm) -> Case:
        """The same case for an attacker of this form."""
        if form is self.forms[0]:
            return self
        return replace(self, knows=replace(self.knows, defence=form.known(self.knows.defence)))

    def about(self, rows: Sequence[int]) -> Knowledge:
        """The knowledge about some of the targets."""
        return given_of(self.task, self.knows, rows, len(self.targets))

    @cached_property
    def orders(self) -> list[Order | None]:
        """The possible orders of the client's minibatches, where they are few; else [None]."""
        return orders_of(self.knows, {target.num_examples for target in self.targets}, self.engine)

    @property
    def followed(self) -> bool:
        """Can a replay repeat all that the client did, given its images? One client, no randomness, an order to try."""
        training = self.knows.training
        if training is None or training.augmentation is not None or training.dropout:
            return False
        if self.aggregate and self.steps != 1:  # each of several clients took steps of its own
            return False
        whole = all(training.batch_size is None or training.batch_size >= each.num_examples for each in self.targets)
        return whole or len(self.orders) > 1

    @property
    def generator(self) -> bool:
        """Is there a generator of images?"""
        return isinstance(self.knows.generator, nn.Module) and isinstance(self.knows.generator, Generator)

    @property
    def blocks(self) -> int:
        """Blocks of the generator: a feature enters each."""
        return int(getattr(self.knows.generator, "blocks", 0))

    @property
    def sampler(self) -> bool:
        """Is there a trained denoiser to sample from?"""
        return self.denoiser and self.knows.generator is not None

    @property
    def unknowns(self) -> int:
        """Entries of the largest target's continuous fields."""
        return unknowns_of(self.task, self.examples)

    @property
    def equations(self) -> int:
        return max(target.equations for target in self.targets)

    def room(self, rows: int) -> bool:
        """Does a dense Jacobian of so many rows fit beside its factors?"""
        return 8 * LevenbergMarquardt().entries(self.unknowns, rows) < 0.6 * memory_of(self.engine)
