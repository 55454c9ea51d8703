"""Which uploads the server accepts: sound ones only, with a reason for each of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.scenario.defence import Upload


class DroppedOut(Exception):
    """Raised inside a client's hooks: this client sends nothing in this round; the round continues without it."""


class ExcludedClient(UserWarning):
    """A client whose upload was not aggregated; the message names client, round and reason."""


@dataclass(frozen=True, eq=False)
class Accepted:
    """The uploads that are aggregated, and why each of the others is not."""

    uploads: dict[int, Upload]
    excluded: dict[int, str]


def accepted(uploads: Mapping[int, Upload | None], weights: Params, sizes: Mapping[int, int] | None = None) -> Accepted:
    """Divide the uploads of a round into sound ones and others. None: the client sent nothing.

    "update" must have the names and shapes of the weights; other trees (moments, masks) and buffers must have those of
    most clients; every number must be finite; `num_examples` must be that of `sizes`, if the server knows it.
    """
    excluded: dict[int, str] = {}
    for client, upload in uploads.items():
        if reason := _misfit(upload, weights, None if sizes is None else sizes.get(client)):
            excluded[client] = reason
    fitting = {client: upload for client, upload in uploads.items() if upload is not None and client not in excluded}
    structures = {client: _structure(upload) for client, upload in fitting.items()}
    # If two are equally common, the first: the server has no reason to prefer either.
    usual = Counter(structures.values()).most_common(1)[0][0] if structures else None
    for client, structure in structures.items():
        if structure != usual:
            excluded[client] = "its upload has other tensors than those of most clients"
    for client, finite in zip(fitting, _all_finite(list(fitting.values())), strict=True):
        if not finite:
            excluded.setdefault(client, "its upload holds values that are not finite (NaN or infinity)")
    sound = {client: upload for client, upload in fitting.items() if client not in excluded}
    return Accepted(sound, {client: excluded[client] for client in uploads if client in excluded})


def mean_buffers(uploads: Sequence[Upload], sizes: Sequence[int], before: Params) -> Params:
    """Average running statistics as FedAvg does with a whole state_dict; counters are the first client's.

    A client that withholds its buffers counts with those it was sent.
    """
    total = sum(sizes)

    def mean(start: Tensor, *values: Tensor) -> Tensor:
        if not start.is_floating_point():
            return values[0]
        # Averages changes, so that what nobody changed (frozen parameters) keeps its last digit.
        changes = [(value - start) * (size / total) for value, size in zip(values, sizes, strict=True)]
        return start + torch.stack(changes).sum(0)

    return tree.detach(tree.map(mean, before, *(upload.buffers or before for upload in uploads)))


def _misfit(upload: Upload | None, weights: Params, size: int | None) -> str:
    """What is wrong with the form of an upload; empty: nothing."""
    if upload is None:
        return "it dropped out: no upload"
    count = upload.num_examples
    if not isinstance(count, int) or count < 1 or (size is not None and count != size):
        return f"it says it has {count!r} examples{'' if size is None else f', and has {size}'}"
    if "update" not in upload.payload:
        return "" if upload.payload else "its upload is empty"
    update = upload.payload["update"]
    if odd := sorted(update.keys() ^ weights.keys()):
        what = "lacks" if odd[0] in weights else "has unknown"
        return f"its update {what} {odd[0]!r}{f' and {len(odd) - 1} more' if len(odd) > 1 else ''}"
    for name, value in update.items():
        if not isinstance(value, Tensor) or value.shape != weights[name].shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"its update has {name!r} of shape {shape} where the weights have {tuple(weights[name].shape)}"
    return ""


def _structure(upload: Upload) -> tuple[object, ...]:
    trees = {**upload.payload, "": upload.buffers or {}}
    return tuple(
        (kind, name, tuple(value.shape)) for kind in sorted(trees) for name, value in sorted(trees[kind].items())
    )


def _all_finite(uploads: Sequence[Upload]) -> list[bool]:
    """Which uploads hold finite numbers only, with one read from the device for all of them."""
    flags = []
    for upload in uploads:
        leaves = [leaf for params in (*upload.payload.values(), upload.buffers or {}) for leaf in tree.leaves(params)]
        values = [leaf.flatten() for leaf in leaves if leaf.is_floating_point()]
        flags.append(torch.cat(values).isfinite().all() if values else torch.ones((), dtype=torch.bool))
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
