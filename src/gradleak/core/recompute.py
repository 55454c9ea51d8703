"""Long rollouts whose derivative holds the state of every step, not the graph of it.

Reverse mode through T steps of a client keeps the activations of all of them, and those of their own backward passes.
Here only what a step is given is kept (a checkpoint), and the step is run again on the way back: one step's graph at a
time, for about one more evaluation of each. Reference: Griewank and Walther, ACM TOMS 26, 2000.

`torch.utils.checkpoint` does not know torch.func; this works under vmap, grad, vjp and jvp, in any order, any number of
times. Nothing in it keeps a step from being captured as a CUDA graph; that was not tried on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gradleak.core import tree
from gradleak.core.tree import Tree

StepFunction: TypeAlias = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
"""(carry, what this step alone is given, what all are given) -> (carry, what it gives)."""


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of tensors, or of dicts and tuples of them, whose derivatives run it again.

    Every tensor that belongs to a lane, or that a derivative is wanted of, must be an ARGUMENT. What the function holds
    besides may be constants that all lanes share, and nothing else: transforms do not reach into it.
    """
    closed(function)
    return _recomputed(function)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        leaves, takes = tree_flatten(arguments)
        again = _Again(function, takes, leaves)
        result = iter(_Recomputed.apply(again, *(leaf for leaf in leaves if isinstance(leaf, Tensor))))
        gives, constants = again.gave
        return tree_unflatten([next(result) if value is _TENSOR else value for value in constants], gives)

    return run


def rollout(
    step: StepFunction, carry: Tree, each: Sequence[Tree], common: Tree | None = None, *, every: int = 1
) -> tuple[Tree, Tree]:
    """Step after step, carry -> carry; returns the last carry, and the sum of what the steps gave.

    step        step(carry, own, common) -> (carry, gives). As for `recomputed`, lanes' tensors come as arguments
    carry       what a step hands to the next: weights, momentum. Names may appear on the way (a velocity)
    each        what each step alone is given, such as its part of the batch; as many as there are steps. Best from ONE
                `split` or `unbind`, whose derivative is one pass; a slice a step makes one of the whole for each
    common      what all steps are given
    every       a checkpoint at every so many steps. Reverse mode holds the carry, and its adjoint, at T / every points,
                and while it is in a block those of the block: sqrt(T) holds least, and costs one evaluation more. 0: no
                checkpoint, the plain graph of all steps
    """
    common = {} if common is None else common
    if not each:
        raise ValueError("A rollout needs at least one step.")
    if every < 0:
        raise ValueError(f"every must be a number of steps, or 0 for no checkpoints; given {every}.")

    def block(carry: Tree, own: Sequence[Any], common: Tree, step: Callable[..., Any]) -> tuple[Tree, Tree]:
        (carry, total), rest = step(carry, own[0], common), own[1:]
        for one in rest:
            carry, given = step(carry, one, common)
            total = tree.add(total, given)
        return carry, total

    if every == 0:
        return block(carry, each, common, step)
    closed(step)
    single = _recomputed(step)
    if every == 1:
        return block(carry, each, common, single)
    blocks = _recomputed(lambda carry, own, common: block(carry, own, common, single))
    return block(carry, [tuple(each[at : at + every]) for at in range(0, len(each), every)], common, blocks)


def closed(function: Callable[..., Any]) -> None:
    """Refuse a function that holds tensors of a lane, or of a derivative: these would be lost, some without a word."""
    seen: set[int] = set()

    def walk(held: Any, where: str) -> None:
        if id(held) in seen or isinstance(held, nn.Module | type):  # a model's own weights are swapped for a lane's
            return
        seen.add(id(held))
        if isinstance(held, Tensor):
            if held.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(held):
                raise ValueError(
                    f"A function that is to be recomputed holds a tensor of a lane or of a derivative: {where}. No "
                    "derivative reaches it there: pass it as an argument, and keep of objects that hold such tensors "
                    "(a Scene) only what holds none (scene.task)."
                )
        elif isinstance(held, Mapping):
            for name, value in held.items():
                walk(value, f"{where}[{name!r}]")
        elif isinstance(held, list | tuple):
            for position, value in enumerate(held):
                walk(value, f"{where}[{position}]")
        elif is_dataclass(held):
            for each in fields(held):
                walk(getattr(held, each.name), f"{where}.{each.name}")
        elif isinstance(held, partial):
            for value in (held.func, held.args, held.keywords):
                walk(value, where)
        elif isinstance(held, MethodType):
            walk(held.__self__, where)
            walk(held.__func__, where)
        elif isinstance(held, FunctionType):
            for name, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=True):
                if cell != CellType():  # one that is not filled yet
                    walk(cell.cell_contents, name)
            walk(held.__defaults__, f"the defaults of {held.__name__}")
        else:  # an object of a class of its own
            for name, value in getattr(held, "__dict__", {}).items():
                walk(value, f"{where}.{name}")

    walk(function, getattr(function, "__name__", "it"))


_TENSOR = object()  # where a tensor goes, among leaves that are none


class _Again:
    """A function of trees as one of flat tensors; other leaves, such as numbers, stay as they are.

    Not a tuple or a dict: torch would take it apart.
    """

    def __init__(self, function: Callable[..., Any], takes: TreeSpec, leaves: Sequence[Any]) -> None:
        self.function, self.takes = function, takes
        self.constants = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.gave: tuple[TreeSpec, list[Any]]  # known once it ran

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        own = iter(tensors)
        leaves = [next(own) if held is _TENSOR else held for held in self.constants]
        flat, gives = tree_flatten(self.function(*tree_unflatten(leaves, self.takes)))
        self.gave = gives, [_TENSOR if isinstance(value, Tensor) else value for value in flat]
        return tuple(value for value in flat if isinstance(value, Tensor))

    def along(self, leaves: Sequence[Tensor]) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """The function of those tensors alone that have derivatives, and these tensors."""
        moving = [position for position, leaf in enumerate(leaves) if _differentiable(leaf)]

        def of(*some: Tensor) -> tuple[Tensor, ...]:
            whole = list(leaves)
            for position, value in zip(moving, some, strict=True):
                whole[position] = value
            return tuple(value for value in self(*whole) if _differentiable(value))

        return of, tuple(leaves[position] for position in moving)


class _Recomputed(torch.autograd.Function):
    """function(*tensors), which keeps its tensors and no graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(again: _Again, *leaves: Tensor) -> tuple[Tensor, ...]:
        # Fresh tensors: a Function must not hand back what it was given, or one tensor twice; a step may.
        known, fresh = {id(leaf) for leaf in leaves}, []
        for value in again(*leaves):
            fresh.append(value.clone() if id(value) in known else value)
            known.add(id(value))
        return tuple(fresh)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.again, *leaves = inputs
        ctx.save_for_backward(*leaves)
        ctx.save_for_forward(*leaves)
        ctx.mark_non_differentiable(*(value for value in output if not _differentiable(value)))
        ctx.gives = [_differentiable(value) for value in output]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        again, leaves = ctx.again, ctx.saved_tensors

        def pulled(leaves: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            of, moving = again.along(leaves)
            back = iter(vjp(of, *moving)[1](grads))
            return tuple(next(back) for leaf in leaves if _differentiable(leaf))

        # Recomputed in its turn: torch.func records every backward pass, to differentiate it once more, and the record
        # of this one would be the very graph that is not to be kept.
        wanted = tuple(grad for grad, differentiable in zip(grads, ctx.gives, strict=True) if differentiable)
        back = iter(_recomputed(pulled)(tuple(leaves), wanted))
        return (None, *(next(back) if _differentiable(leaf) else None for leaf in leaves))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        """Forward mode keeps nothing, so there is nothing to save: the function is run once more, with tangents."""
        leaves = ctx.saved_tensors
        of, moving = ctx.again.along(leaves)
        moved = [
            torch.zeros_like(leaf) if tangent is None else tangent
            for leaf, tangent in zip(leaves, tangents, strict=True)
            if _differentiable(leaf)
        ]
        along = iter(jvp(of, moving, tuple(moved))[1])
        return tuple(next(along) if differentiable else None for differentiable in ctx.gives)


def _differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
