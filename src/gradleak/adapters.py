"""Observations from the files of other frameworks: state_dicts, NumPy arrays, differences of weights.

    seen = adapters.from_state_dicts(before, after, num_examples=8, task=task)

A state_dict holds more than trained weights: running statistics, counters, frozen layers, and tied weights under all
their names. One of adapters alone, such as LoRA's, holds less: frozen weights are then those of the task's model. With
the task, its model says which is which; without it, names and dtypes decide, and `fitted` sorts them later.
docs/adapters.md shows where NVFlare and OpenFL keep what is needed here.
"""

from __future__ import annotations

import os
import re
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
"""Last parts of the names of torch's running statistics, which are not trained."""

PREFIXES = ("module.", "_module.", "_orig_mod.", "model.")
"""Prefixes that DataParallel, Opacus, torch.compile and wrappers put before every name."""

PEFT = "base_model.model."
"""Prefix of PEFT's wrapper. `inject_adapter_in_model` puts adapters into a model without it."""
SAVED = re.compile(r"\bmodules_to_save\.[^.]+\.")  # a layer that is trained as a whole beside the adapters
ADAPTER = re.compile(r"(\.lora_\w+)\.[^.]+")  # followed by the name of the adapter


def is_weight(name: str, floating: bool) -> bool:
    """Whether a tensor is trained, by its name and dtype."""
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
    """From the model that was sent and the one that came back, by name: tensors or NumPy arrays.

    The update has the precision of the weights: digits that float32 weights rounded off are lost.
    """
    sent, returned = tensors_of(before), tensors_of(after)
    if odd := sorted(sent.keys() ^ returned.keys()):
        side = "after" if odd[0] in returned else "before"
        raise BadObservation(f"{odd[0]!r} is only in `{side}`: give the same model before and after the round.")
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
    """From the model that was sent and what the client ADDS to it: after minus before, such as NVFlare's WEIGHT_DIFF.

    More exact than weights after the round, since nothing was rounded to the digits of the weights. A tensor of the
    model that has no difference did not change.
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
    """From two .npz files, as `np.savez(path, **state_dict)` writes them; `about`: as in `from_state_dicts`."""
    return from_state_dicts(read_npz(before), read_npz(after), num_examples, **about)


def read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arrays of an .npz file by name. Pickled arrays are refused: reading them would run code."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise BadObservation(f"{path} holds one array, not several by name: write it with np.savez.")
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError:
        raise BadObservation(f"There is no file {path}.") from None
    except (OSError, ValueError, EOFError) as problem:
        if isinstance(problem, BadObservation):
            raise
        raise BadObservation(
            f"{path} is not a readable .npz of plain arrays ({problem}). Write it with np.savez."
        ) from None


def fitted(seen: Observation, task: Task) -> Observation:
    """An observation that was recorded without the task, with its tensors sorted and named as in this task.

    What the task trains becomes weights, everything else buffers. Second names of tied weights are dropped. Names that
    are numbers (lists of arrays) follow the order of the model's state_dict.
    """
    if seen.weights.keys() == task.weights().keys() and (seen.buffers or {}).keys() <= task.buffers().keys():
        return seen
    before = {**seen.weights, **(seen.buffers or {})}
    returned = {**(seen.buffers or {}), **(seen.returned_buffers or {})}
    # A recorded buffer may turn out to be trained: then its change is an update.
    change = {**seen.update, **{name: _moved(value, returned[name]) for name, value in (seen.buffers or {}).items()}}
    after = {**{name: value - seen.update[name] for name, value in seen.weights.items()}, **returned}
    weights, buffers = sorted_state(before, task)
    update, _ = sorted_state(change, task)
    # Drop second names: weight minus update is rounded, and would differ from its copy.
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
    """The change of a buffer; 0 for counters and masks, which are never trained (and cannot all subtract)."""
    return before - after.to(before) if before.is_floating_point() else torch.zeros_like(before)


def sorted_state(state: Mapping[str, Tensor], task: Task | None) -> tuple[Params, Params]:
    """A state_dict as (trained tensors, all others)."""
    if task is None:
        trained = {name: value for name, value in state.items() if is_weight(name, value.is_floating_point())}
        return trained, {name: value for name, value in state.items() if name not in trained}
    named, other_names = _named(state, task), tied(task)
    for name, first in other_names.items():
        if name in named and first in named and not torch.equal(named[name], named[first]):
            raise BadObservation(
                f"{name!r} and {first!r} are one tensor of the model, and differ here: the two were changed apart, "
                "so neither is what the client trained."
            )
    wanted = task.weights()
    missing = [name for name in wanted if name not in named]
    unknown = [name for name in named if name not in wanted and name not in task.buffers() and name not in other_names]
    if missing or unknown:
        odd = [f"it lacks {missing[0]!r} and {len(missing) - 1} more"] if len(missing) > 1 else []
        odd += [f"it lacks {missing[0]!r}"] if len(missing) == 1 else []
        odd += [f"the model has no {unknown[0]!r}"] if unknown else []
        raise BadObservation(
            f"The recorded model is not that of the task: {'; '.join(odd)}. Give the task of the model that was sent."
        )
    weights = {name: named[name] for name in wanted}
    return weights, {name: named[name] for name in task.buffers() if name in named}


def _named(state: Mapping[str, Tensor], task: Task) -> dict[str, Tensor]:
    """A state_dict by the model's own names."""
    return {name: state[recorded] for recorded, name in own_names(state, task).items()}


def own_names(state: Mapping[str, Any], task: Task) -> dict[str, str]:
    """The model's own name for each recorded one: without the prefix of a wrapper, and with numbers taken in order.

    The short names of `peft.get_peft_model_state_dict` become the model's. Of the values only shapes are looked at.
    """
    model = dict(task.model.state_dict())
    if state and all(name.isdigit() for name in state):
        return _numbered(state, task)
    known = _adapter_names(task) | {name: name for name in model}
    for prefix in ("", *PREFIXES, PEFT):
        names = {name: known.get(name.removeprefix(prefix)) for name in state if name.startswith(prefix)}
        found = {name: own for name, own in names.items() if own is not None}
        if len(found) == len(state):
            return found
    for prefix in PREFIXES:  # not this model: the names that are missing are shown without their prefix
        if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in model):
            return {name: name[len(prefix) :] for name in state}
    return {name: known.get(name, name) for name in state}


def _numbered(state: Mapping[str, Any], task: Task) -> dict[str, str]:
    """A list of arrays: the whole state_dict in order, or the trained tensors alone, as of adapters."""
    model, trained = task.model.state_dict(), task.weights()
    ordered = sorted(state, key=int)
    shapes = [tuple(state[name].shape) for name in ordered]
    for candidates in (list(model), [name for name in model if name in trained]):
        if shapes == [tuple(model[name].shape) for name in candidates]:
            return dict(zip(ordered, candidates, strict=True))
    raise BadObservation(
        f"The recorded model is a list of {len(ordered)} arrays without names, and their shapes are not those "
        f"of the task's state_dict, which has {len(model)}, nor of the {len(trained)} that it trains: give arrays by "
        "name."
    )


def _adapter_names(task: Task) -> dict[str, str]:
    """Short names of adapters' tensors, which leave out the adapter's own: lora_A.weight for lora_A.default.weight.

    A short name that two trained tensors would share stands for neither.
    """
    names: dict[str, str] = {}
    doubtful = set()
    for name in task.weights():
        short = ADAPTER.sub(r"\1", SAVED.sub("", name))
        if short == name:
            continue
        bare = short.removesuffix(".weight") if short.endswith("lora_magnitude_vector.weight") else short
        for each in {short, bare, short.removeprefix(PEFT), bare.removeprefix(PEFT)}:
            if names.setdefault(each, name) != name:
                doubtful.add(each)
    return {short: name for short, name in names.items() if short not in doubtful}


def tied(task: Task) -> dict[str, str]:
    """The other names of tied parameters, each with the name in `Task.weights`."""
    first = {id(value): name for name, value in task.model.named_parameters()}
    every = task.model.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in every if first[id(value)] != name}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies on the CPU, so that further training does not change them."""
    return {str(name): _tensor(str(name), value) for name, value in state.items()}


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadObservation(f"{name!r} holds {array.dtype}, not numbers.")
    return torch.from_numpy(np.array(array, order="C"))  # a copy, so that it can be written to
