"""Who holds which examples. Two different conventions are called "Dirichlet with alpha": see the classes below.

A partition is a frozen dataclass of its settings; `Federation(split="dir_class:alpha=0.5")` makes one by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradleak.core.registry import BadSetting, named, spelled

Labels: TypeAlias = Callable[[], Tensor]  # reads the class of every example; not all partitions call it
ATTEMPTS = 1_000  # of dir_class: a split that has not come up by then hardly ever will


class FederationError(ValueError):
    """There are not enough data for the requested clients, examples or targets, or a training cannot continue."""


def demand_number(what: str, value: Any, kind: type, least: float, most: float | None = None) -> None:
    """Raise unless the value is a number of this kind (int or float) within the bounds."""
    right = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not right or not value >= least or (most is not None and not value <= most):
        word = "a whole number" if kind is int else "a number"
        bounds = f"of at least {least:g}" if most is None else f"from {least:g} to {most:g}"
        raise BadSetting(f"{what} must be {word} {bounds}; given {value!r}.")


class Partition(Protocol):
    """Divides `count` examples among clients."""

    @property
    def name(self) -> str: ...

    def shares(self, count: int, clients: int, labels: Labels, generator: torch.Generator) -> list[Tensor]: ...


@dataclass(frozen=True)
class IID:
    """Shuffle, split equally: sizes differ by at most one."""

    name: ClassVar[str] = "iid"

    def shares(self, count: int, clients: int, labels: Labels, generator: torch.Generator) -> list[Tensor]:
        shuffled = torch.randperm(count, generator=generator)
        return [shuffled[client::clients] for client in range(clients)]


@dataclass(frozen=True)
class BalancedIID:
    """Every class is shuffled and split equally: clients differ by at most one example in each class, and in all."""

    name: ClassVar[str] = "iid_balanced"

    def shares(self, count: int, clients: int, labels: Labels, generator: torch.Generator) -> list[Tensor]:
        shuffled = torch.randperm(count, generator=generator)
        by_class = shuffled[torch.argsort(labels()[shuffled], stable=True)]
        return [by_class[client::clients] for client in range(clients)]


@dataclass(frozen=True)
class ClassDirichlet:
    """Class by class: p_c ~ Dir(alpha, ..., alpha) over the clients divides class c; sizes of clients vary.

    All classes are drawn again until every client holds `min_size` examples. Reference: Yurochkin et al., ICML 2019;
    Li et al., ICDE 2022.
    """

    alpha: float = 0.5
    min_size: int = 10
    name: ClassVar[str] = "dir_class"

    def __post_init__(self) -> None:
        demand_number("alpha of dir_class", self.alpha, float, 1e-6)
        demand_number("min_size of dir_class", self.min_size, int, 1)

    def shares(self, count: int, clients: int, labels: Labels, generator: torch.Generator) -> list[Tensor]:
        members = _by_class(count, labels, generator)
        source = _numpy(generator)
        for _ in range(ATTEMPTS if count >= clients * self.min_size else 0):
            parts = []
            for rows in members:
                cuts = np.cumsum(source.dirichlet(np.full(clients, float(self.alpha))))[:-1]
                parts.append(np.split(rows, (cuts * len(rows)).astype(np.int64)))
            clients_rows = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
            if min(map(len, clients_rows)) >= self.min_size:
                return [torch.from_numpy(source.permutation(rows)) for rows in clients_rows]
        raise FederationError(
            f"{spelled(self)} gave no split of {count} examples in which each of {clients} clients holds "
            f"{self.min_size}: use more data, fewer clients, a larger alpha or a smaller min_size."
        )


@dataclass(frozen=True)
class ClientDirichlet:
    """Client by client: all hold equally many, of classes drawn by q_i ~ Dir(alpha, ..., alpha) over the classes.

    Examples are drawn without replacement; when a class has run out, q_i is renormalised over the others (uniform if it
    has no weight on them). alpha=0 is the limit of one class per client, always of those with most examples remaining,
    so that each share holds one class if the numbers allow it. Reference: Hsu, Qi, Brown, arXiv 1909.06335.
    """

    alpha: float = 0.5
    name: ClassVar[str] = "dir_client"

    def __post_init__(self) -> None:
        demand_number("alpha of dir_client", self.alpha, float, 0)

    def shares(self, count: int, clients: int, labels: Labels, generator: torch.Generator) -> list[Tensor]:
        members = _by_class(count, labels, generator)
        remaining = np.array([len(rows) for rows in members])
        source = _numpy(generator)
        shares = []
        for client in range(clients):
            wanted = count // clients + (client < count % clients)
            mixture = self._mixture(remaining, source)
            taken = np.zeros_like(remaining)
            while taken.sum() < wanted:
                # Overdrawn classes give all they have and the rest is drawn again: the same as drawing one by one.
                mixture = np.where(remaining - taken > 0, mixture, 0.0)
                mixture = mixture if mixture.sum() > 0 else (remaining - taken > 0).astype(float)
                drawn = source.multinomial(int(wanted - taken.sum()), mixture / mixture.sum())
                taken += np.minimum(drawn, remaining - taken)
            parts = [rows[n - k : n] for rows, n, k in zip(members, remaining, taken, strict=True)]
            remaining = remaining - taken
            shares.append(torch.from_numpy(source.permutation(np.concatenate(parts))))
        return shares

    def _mixture(self, remaining: Any, source: np.random.Generator) -> Any:
        if self.alpha:
            return source.dirichlet(np.full(len(remaining), float(self.alpha)))
        fullest = source.choice(np.flatnonzero(remaining == remaining.max()))
        return np.eye(len(remaining))[fullest]


@dataclass(frozen=True)
class InOrder:
    """Consecutive blocks of equal size: with `Writers.first(N).images`, client i holds what writer i wrote."""

    name: ClassVar[str] = "in_order"

    def shares(self, count: int, clients: int, labels: Labels, generator: torch.Generator) -> list[Tensor]:
        if count % clients:
            raise FederationError(
                f"in_order gives every client the same number of consecutive examples, and {clients} clients do not "
                f"divide {count}: as many clients as writers, and `Writers.first(N).images` as data."
            )
        return list(torch.arange(count).split(count // clients))


for _kind in (IID, BalancedIID, ClassDirichlet, ClientDirichlet, InOrder):
    named(_kind.name, kind="partition", status="")(_kind)


def _by_class(count: int, labels: Labels, generator: torch.Generator) -> list[Any]:
    """The shuffled rows of each class."""
    shuffled = torch.randperm(count, generator=generator)
    classes = labels()[shuffled]
    return [shuffled[classes == label].numpy() for label in classes.unique()]


def _numpy(generator: torch.Generator) -> np.random.Generator:
    """For Dirichlet draws, which torch makes from its global generator only."""
    return np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
