"""What a server can tell of an observation before it attacks: by this, and nothing else, members are picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from gradleak.attack.cascade import given_of
from gradleak.attacks.analytic import input_layer
from gradleak.attacks.second_order import orders_of
from gradleak.attacks.second_order.smoothing import kinked
from gradleak.core import tree
from gradleak.engine import Engine, memory_of, unknowns_of
from gradleak.generators import Generator
from gradleak.parts.levenberg import LevenbergMarquardt
from gradleak.parts.view import TargetView
from gradleak.scenario.client import Order
from gradleak.scenario.defence import Defence, OnlyVisible, overrides
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Track
from gradleak.scenario.task import Task, TaskError

NEARLY, MOSTLY = 0.01, 0.9  # of the entries nine in ten have nearly the same size: those of a gradient never do
ADAPTIVE, MASKED, NAIVE = "adaptive", "masked", "naive"  # A2, A1 and A0
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, eq=False)
class Case:
    """Observation, task and knowledge, by the properties that attacks hang on. Nothing here is the client's own."""

    task: Task
    targets: tuple[Track, ...]
    knows: Knowledge
    engine: Engine

    def __post_init__(self) -> None:
        fits(self.task, [seen for target in self.targets for seen in target.observations])

    @property
    def denoiser(self) -> bool:
        """Do clients draw a step and noise for every example?"""
        return {"t", "noise"} <= self.task.drawn

    @property
    def images(self) -> bool:
        """Are examples pictures, (channels, height, width)?"""
        return "x" in self.task.fields and len(self.task.fields["x"].shape) == 3

    @property
    def classifier(self) -> bool:
        """Images with labels: what most attacks are made for."""
        return self.images and not self.denoiser and "y" in self.task.fields

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
            input_layer(TargetView.of(self.task, self.targets[0].last, self.knows))
        except TaskError:
            return False
        return True

    @property
    def steps(self) -> int | None:
        """Local steps of the client, the most of all targets; None: the threat model does not grant its recipe."""
        training = self.knows.training
        return None if training is None else max(len(training.order(each.num_examples)) for each in self.targets)

    @property
    def single(self) -> bool:
        """May the update be one gradient?"""
        return self.steps in (None, 1)

    @property
    def examples(self) -> int:
        """The most of all targets."""
        return max(each.num_examples for each in self.targets)

    @property
    def step_rule(self) -> str:
        """How a denoiser's steps are found: read off one gradient; those of several add up, and are searched for."""
        return "analytic" if self.single else "soft"

    @property
    def several(self) -> bool:
        """May it be the sum of several steps?"""
        return self.steps is None or self.steps > 1

    @cached_property
    def signs(self) -> bool:
        """Does the update hold little more than signs, as of an optimiser that divides by its own size?"""
        sizes = tree.flatten(self.targets[0].last.update).abs().double()
        sizes = sizes[sizes > 0]
        return len(sizes) > 0 and float(((sizes / sizes.median() - 1).abs() < NEARLY).double().mean()) > MOSTLY

    @property
    def aggregate(self) -> bool:
        """Is what was seen the sum of several clients' uploads?"""
        return any(seen.clients > 1 for target in self.targets for seen in target.observations)

    @cached_property
    def forms(self) -> dict[str, Defence | None]:
        """What an attacker who knows so much may take the defence for: all of it, what it leaves visible, or nothing.

        From the most to the least informed, and only what differs. Who knows more is free to use less.
        """
        known = self.knows.defence
        if known is None:
            return {NAIVE: None}
        if isinstance(known, OnlyVisible):
            return {MASKED: known, NAIVE: None}
        compared = any(overrides(known, hook) for hook in ("noise_variance", "visible"))
        half: dict[str, Defence | None] = {MASKED: OnlyVisible(known)} if compared else {}
        return {ADAPTIVE: known, **half, NAIVE: None}

    def taking(self, form: str) -> Case:
        """The same case to an attacker who takes the defence for this form of it."""
        return replace(self, knows=replace(self.knows, defence=self.forms[form]))

    def about(self, rows: Sequence[int]) -> Knowledge:
        """The knowledge about some of the targets."""
        return given_of(self.task, self.knows, rows, len(self.targets))

    @cached_property
    def orders(self) -> list[Order | None]:
        """The orders in which a client may have walked through its minibatches, where they are few; else [None]."""
        return orders_of(self.knows, {target.num_examples for target in self.targets}, self.engine)

    @property
    def followed(self) -> bool:
        """Can a replay repeat what the client did, but for its images? One client, no randomness, an order to try."""
        training = self.knows.training
        if training is None or training.augmentation is not None or training.dropout:
            return False
        if self.aggregate and self.steps != 1:  # several clients walked, each its own way
            return False
        whole = all(training.batch_size is None or training.batch_size >= each.num_examples for each in self.targets)
        return whole or len(self.orders) > 1

    @property
    def generator(self) -> bool:
        """Is there a generator of images?"""
        return isinstance(self.knows.generator, nn.Module) and isinstance(self.knows.generator, Generator)

    @property
    def blocks(self) -> int:
        """Of the generator: a feature enters each."""
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
