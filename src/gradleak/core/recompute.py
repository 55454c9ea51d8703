"""Long rollouts whose derivative stores the inputs of every step, not its graph.

Reverse mode through T steps of a client stores the activations of all steps and of their own backward passes. Here only
the inputs of a step are stored (a checkpoint), and the backward pass runs the step again: one step's graph at a time,
for about one more evaluation of each. Reference: Griewank and Walther, ACM TOMS 26, 2000.

`torch.utils.checkpoint` does not support torch.func; this works under vmap, grad, vjp and jvp, in any order and nested.
A step can still be captured as a CUDA graph; that is not tested on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gradleak.core import tree
from gradleak.core.tree import Tree

StepFunction: TypeAlias = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
"""(carry, inputs of this step alone, inputs of all steps) -> (carry, output)."""


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of tensors, or of dicts and tuples of them, whose derivatives run it again.

    Every tensor that belongs to a lane, or that a derivative is taken of, must be an ARGUMENT. The function may hold
    only constants that all lanes share: transforms do not reach into its closure.
    """
    closed(function)
    return _recomputed(function)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        leaves, takes = tree_flatten(arguments)
        again = _Again(function, takes, leaves)
        result = iter(_Recomputed.apply(again, *(leaf for leaf in leaves if isinstance(leaf, Tensor))))
        gives, constants = again.result
        return tree_unflatten([next(result) if value is _TENSOR else value for value in constants], gives)

    return run


def rollout(
    step: StepFunction, carry: Tree, each: Sequence[Tree], common: Tree | None = None, *, every: int = 1
) -> tuple[Tree, Tree]:
    """Run the steps in sequence; return the last carry, and the sum of the steps' outputs.

    step        step(carry, own, common) -> (carry, output). As for `recomputed`, lanes' tensors come as arguments
    carry       passed from step to step: weights, momentum. A step may add names (a velocity)
    each        inputs of each step alone, such as its part of the batch; their number is the number of steps. Best from
                ONE `split` or `unbind`, whose derivative is one pass; a slice for each step makes one pass per step
    common      inputs of all steps
    every       steps between checkpoints. Reverse mode stores the carry and its adjoint at T / every points, and inside
                a block those of the block: sqrt(T) needs the least memory, for one more evaluation. 0: no checkpoint,
                the plain graph of all steps
    """
    common = {} if common is None else common
    if not each:
        raise ValueError("A rollout needs at least one step.")
    if every < 0:
        raise ValueError(f"every must be a number of steps, or 0 for no checkpoints; given {every}.")

    def block(carry: Tree, inputs: Sequence[Any], common: Tree, step: Callable[..., Any]) -> tuple[Tree, Tree]:
        (carry, total), rest = step(carry, inputs[0], common), inputs[1:]
        for one in rest:
            carry, output = step(carry, one, common)
            total = tree.add(total, output)
        return carry, total

    if every == 0:
        return block(carry, each, common, step)
    closed(step)
    single = _recomputed(step)
    if every == 1:
        return block(carry, each, common, single)
    blocks = _recomputed(lambda carry, inputs, common: block(carry, inputs, common, single))
    return block(carry, [tuple(each[at : at + every]) for at in range(0, len(each), every)], common, blocks)


def closed(function: Callable[..., Any]) -> None:
    """Refuse a function that holds tensors of a lane or of a derivative: derivatives would miss them, some silently."""
    visited: set[int] = set()

    def walk(value: Any, where: str) -> None:
        if id(value) in visited or isinstance(value, nn.Module | type):  # a lane's weights replace a model's
            return
        visited.add(id(value))
        if isinstance(value, Tensor):
            if value.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(value):
                raise ValueError(
                    f"A function that is to be recomputed holds a tensor of a lane or of a derivative: {where}. No "
                    "derivative reaches it there: pass it as an argument, and keep of objects that hold such tensors "
                    "(a TargetView) only what holds none (scene.task)."
                )
        elif isinstance(value, Mapping):
            for name, member in value.items():
                walk(member, f"{where}[{name!r}]")
        elif isinstance(value, list | tuple):
            for position, member in enumerate(value):
                walk(member, f"{where}[{position}]")
        elif is_dataclass(value):
            for each in fields(value):
                walk(getattr(value, each.name), f"{where}.{each.name}")
        elif isinstance(value, partial):
            for member in (value.func, value.args, value.keywords):
                walk(member, where)
        elif isinstance(value, MethodType):
            walk(value.__self__, where)
            walk(value.__func__, where)
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if cell != CellType():  # one that is not filled yet
                    walk(cell.cell_contents, name)
            walk(value.__defaults__, f"the defaults of {value.__name__}")
        else:  # an object of a class of its own
            for name, member in getattr(value, "__dict__", {}).items():
                walk(member, f"{where}.{name}")

    walk(function, getattr(function, "__name__", "it"))


_TENSOR = object()  # marks the place of a tensor among other leaves


class _Again:
    """A function of trees as one of flat tensors; other leaves, such as numbers, stay as they are.

    Not a tuple or a dict: torch would take it apart. `modes`: those that replace functions of torch here. A backward
    pass runs without them, and what it computes again must be the same function.
    """

    def __init__(self, function: Callable[..., Any], takes: TreeSpec, leaves: Sequence[Any]) -> None:
        self.function, self.takes = function, takes
        self.constants = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.result: tuple[TreeSpec, list[Any]]  # set by a call
        self.modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        following = iter(tensors)
        leaves = [next(following) if value is _TENSOR else value for value in self.constants]
        with ExitStack() as stack:
            active = _get_current_function_mode_stack()
            for mode in self.modes:
                if not any(mode is each for each in active):
                    stack.enter_context(mode)
            flat, gives = tree_flatten(self.function(*tree_unflatten(leaves, self.takes)))
        self.result = gives, [_TENSOR if isinstance(value, Tensor) else value for value in flat]
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
    """function(*tensors) that stores its inputs and no graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(again: _Again, *leaves: Tensor) -> tuple[Tensor, ...]:
        # Fresh tensors: a Function must not return its inputs, or one tensor twice; a step may.
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

        # Recomputed too: torch.func records every backward pass, to differentiate it once more, and the record of this
        # one would be the graph that must not be stored.
        wanted = tuple(grad for grad, differentiable in zip(grads, ctx.gives, strict=True) if differentiable)
        back = iter(_recomputed(pulled)(tuple(leaves), wanted))
        return (None, *(next(back) if _differentiable(leaf) else None for leaf in leaves))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        """Forward mode stores nothing: the function runs once more, with tangents."""
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
