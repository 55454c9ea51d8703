"""What other frameworks keep of a round, as an `Observation`: state_dicts, NumPy arrays, differences of weights.

    seen = adapters.from_state_dicts(before, after, num_examples=8, task=task)

A state_dict holds more than trained weights: running statistics, counters, frozen layers, and tied weights under every
one of their names. Given the task, tensors are sorted as its model has them; without it by their names and types alone,
and `fitted` sorts them later. docs/adapters.md shows where NVFlare and OpenFL keep what is needed here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradleak.core.tree import Params
from gradleak.scenario.observation import BadObservation, Observation
from gradleak.scenario.task import Task

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names that torch's normalisation layers give to what they count, and do not train."""

PREFIXES = ("module.", "_module.", "_orig_mod.", "model.")
"""That DataParallel, Opacus, torch.compile and wrappers put before every name."""


def is_weight(name: str, floating: bool) -> bool:
    """Is this a trained tensor, as far as its name and type tell?"""
    return floating and name.rpartition(".")[2] not in STATISTICS


def from_state_dicts(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    num_examples: int,
    *,
    task: Task | None = None,
    round: int = 0,
    clients: int = 1,
    key: str = "target",
) -> Observation:
    """The model that was sent and the one that came back, by name: tensors or NumPy arrays.

    The update is taken in the precision of the weights: what float32 weights have rounded off is lost.
    """
    sent, returned = tensors_of(before), tensors_of(after)
    if odd := sorted(sent.keys() ^ returned.keys()):
        side = "after" if odd[0] in returned else "before"
        raise BadObservation(f"{odd[0]!r} is in `{side}` alone: give the same model before and after the round.")
    weights, buffers = sorted_state(sent, task)
    new_weights, new_buffers = sorted_state(returned, task)
    for name, value in weights.items():
        if new_weights[name].shape != value.shape:
            raise BadObservation(
                f"{name!r} has shape {tuple(value.shape)} before and {tuple(new_weights[name].shape)} after."
            )
    return Observation(
        weights=weights,
        update={name: value - new_weights[name].to(value) for name, value in weights.items()},
        num_examples=num_examples,
        round=round,
        clients=clients,
        key=key,
        buffers=buffers or None,
        returned_buffers=new_buffers or None,
    )


def from_difference(
    before: Mapping[str, Any],
    difference: Mapping[str, Any],
    num_examples: int,
    *,
    task: Task | None = None,
    round: int = 0,
    clients: int = 1,
    key: str = "target",
) -> Observation:
    """The model that was sent, and what the client says to ADD to it: after minus before, as NVFlare's WEIGHT_DIFF is.

    More exact than weights after the round: nothing was rounded to the digits of the weights. A tensor of the model
    that has no difference did not change.
    """
    sent, moved = tensors_of(before), tensors_of(difference)
    if odd := sorted(moved.keys() - sent.keys()):
        raise BadObservation(f"The difference holds {odd[0]!r}, which the model that was sent does not.")
    whole = {name: moved.get(name, torch.zeros_like(value)) for name, value in sent.items()}
    weights, buffers = sorted_state(sent, task)
    change, changed = sorted_state(whole, task)
    return Observation(
        weights=weights,
        update={name: -change[name].to(value) for name, value in weights.items()},
        num_examples=num_examples,
        round=round,
        clients=clients,
        key=key,
        buffers=buffers or None,
        returned_buffers={name: value + changed[name].to(value.dtype) for name, value in buffers.items()} or None,
    )


def from_npz(
    before: str | os.PathLike[str], after: str | os.PathLike[str], num_examples: int, **about: Any
) -> Observation:
    """The same from two .npz files, as `np.savez(path, **state_dict)` writes them; `about`: as `from_state_dicts`."""
    return from_state_dicts(read_npz(before), read_npz(after), num_examples, **about)


def read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arrays of an .npz file by name. Pickled ones are refused: reading them would run code."""
    try:
        held = np.load(path, allow_pickle=False)
        if isinstance(held, np.ndarray):
            raise BadObservation(f"{path} holds one array, not several by name: write it with np.savez.")
        with held:
            return {name: held[name] for name in held.files}
    except FileNotFoundError:
        raise BadObservation(f"There is no file {path}.") from None
    except (OSError, ValueError, EOFError) as problem:
        if isinstance(problem, BadObservation):
            raise
        raise BadObservation(
            f"{path} is not a readable .npz of plain arrays ({problem}). Write it with np.savez."
        ) from None


def fitted(seen: Observation, task: Task) -> Observation:
    """The observation with its tensors sorted and named as this task has them: for one that was recorded without it.

    What the task trains is weights, everything else buffers; a second name of tied weights is dropped; names that are
    numbers (lists of arrays) are taken in the order of the model's state_dict.
    """
    if seen.weights.keys() == task.weights().keys() and (seen.buffers or {}).keys() <= task.buffers().keys():
        return seen
    before = {**seen.weights, **(seen.buffers or {})}
    returned = {**(seen.buffers or {}), **(seen.returned_buffers or {})}
    # What came back, where it is not an update already: a buffer that turns out to be trained has to become one.
    change = {**seen.update, **{name: _moved(value, returned[name]) for name, value in (seen.buffers or {}).items()}}
    after = {**{name: value - seen.update[name] for name, value in seen.weights.items()}, **returned}
    weights, buffers = sorted_state(before, task)
    update, _ = sorted_state(change, task)
    # Second names go first: a weight less its update is what came back to rounding, and would differ from its copy.
    names, again = own_names(before, task), tied(task)
    _, back = sorted_state({names[name]: value for name, value in after.items() if names[name] not in again}, task)
    return replace(
        seen,
        weights=weights,
        update=update,
        buffers=buffers or None,
        returned_buffers=(back or None) if seen.returned_buffers or set(seen.weights) - set(weights) else None,
    )


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """What a buffer changed by; nothing for counters and masks, which are never trained (and cannot all subtract)."""
    return before - after.to(before) if before.is_floating_point() else torch.zeros_like(before)


def sorted_state(state: Mapping[str, Tensor], task: Task | None) -> tuple[Params, Params]:
    """A state_dict as (what is trained, everything else)."""
    if task is None:
        trained = {name: value for name, value in state.items() if is_weight(name, value.is_floating_point())}
        return trained, {name: value for name, value in state.items() if name not in trained}
    held, other_names = _named(state, task), tied(task)
    for name, first in other_names.items():
        if name in held and first in held and not torch.equal(held[name], held[first]):
            raise BadObservation(
                f"{name!r} and {first!r} are one tensor of the model, and differ here: the two were changed apart, "
                "so neither is what the client trained."
            )
    wanted = task.weights()
    missing = [name for name in wanted if name not in held]
    unknown = [name for name in held if name not in wanted and name not in task.buffers() and name not in other_names]
    if missing or unknown:
        told = [f"it lacks {missing[0]!r} and {len(missing) - 1} more"] if len(missing) > 1 else []
        told += [f"it lacks {missing[0]!r}"] if len(missing) == 1 else []
        told += [f"the model has no {unknown[0]!r}"] if unknown else []
        raise BadObservation(
            f"The recorded model is not that of the task: {'; '.join(told)}. Give the task of the model that was sent."
        )
    weights = {name: held[name] for name in wanted}
    return weights, {name: held[name] for name in task.buffers() if name in held}


def _named(state: Mapping[str, Tensor], task: Task) -> dict[str, Tensor]:
    """By the model's own names."""
    return {own: state[given] for given, own in own_names(state, task).items()}


def own_names(state: Mapping[str, Tensor], task: Task) -> dict[str, str]:
    """The model's name of each given one: without a prefix of a wrapper, and numbers taken in order."""
    own = dict(task.model.state_dict())
    if state and all(name.isdigit() for name in state):
        ordered = sorted(state, key=int)
        if [tuple(state[name].shape) for name in ordered] != [tuple(value.shape) for value in own.values()]:
            raise BadObservation(
                f"The recorded model is a list of {len(ordered)} arrays without names, and their shapes are not those "
                f"of the task's state_dict, which has {len(own)}: give arrays by name."
            )
        return dict(zip(ordered, own, strict=True))
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own):
            return {name: name[len(prefix) :] for name in state}
    return {name: name for name in state}


def tied(task: Task) -> dict[str, str]:
    """Further names of tied parameters, and the name by which `Task.weights` has them."""
    first = {id(value): name for name, value in task.model.named_parameters()}
    every = task.model.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in every if first[id(value)] != name}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors on the CPU, copied: nothing here is changed when the training goes on."""
    return {str(name): _tensor(str(name), value) for name, value in state.items()}


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadObservation(f"{name!r} holds {array.dtype}, not numbers.")
    return torch.from_numpy(np.array(array, order="C"))  # a copy, so that it can be written to
