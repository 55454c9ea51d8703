"""LSTM, GRU and RNN step by step, called as torch's own functions.

Torch's kernels for whole sequences fail under vmap, and those of cuDNN have no second derivative. These forms use
matrix products and elementwise functions alone, so every derivative exists. They launch several kernels per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

State: TypeAlias = tuple[Tensor, ...]
"""What a layer remembers: (h, c) of an LSTM, (h,) of the others."""

StepRule: TypeAlias = Callable[..., State]
"""(W x + b, state, weights of the state, and its bias) -> the next state. An LSTM may have a projection."""


# --- one step -------------------------------------------------------------------------------------------------------


def _lstm_step(
    from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None, projection: Tensor | None = None
) -> State:
    h, c = state
    write, keep, new, read = (from_input + F.linear(h, weight, bias)).chunk(4, -1)
    c = keep.sigmoid() * c + write.sigmoid() * new.tanh()
    h = read.sigmoid() * c.tanh()
    return (h if projection is None else F.linear(h, projection)), c


def _gru_step(from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (h,) = state
    inputs, states = from_input.chunk(3, -1), F.linear(h, weight, bias).chunk(3, -1)
    reset, keep = ((x + y).sigmoid() for x, y in zip(inputs[:2], states[:2], strict=True))
    new = (inputs[2] + reset * states[2]).tanh()
    return (new + keep * (h - new),)


def _tanh_step(from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return ((from_input + F.linear(state[0], weight, bias)).tanh(),)


def _relu_step(from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return (F.relu(from_input + F.linear(state[0], weight, bias)),)


# --- whole sequences ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu."""

    input: Tensor  # (time, batch, features), or batch first
    hx: Any  # (layers x directions, batch, units), or two of them
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    def __post_init__(self) -> None:
        if not isinstance(self.has_biases, bool):  # torch takes the weights at this place for a packed sequence
            raise NotImplementedError(
                "Packed sequences are unsupported: attacks run recurrent layers step by step, and all sequences must "
                "have the same length. Give the layer the padded tensor, without pack_padded_sequence."
            )

    @property
    def states(self) -> State:
        return (self.hx,) if isinstance(self.hx, Tensor) else tuple(self.hx)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def weights(self, at: int) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor | None, ...]]:
        """(weight and bias for the input), (weight and bias for the state, and a projection if there is one)."""
        count = len(self.params) // (self.num_layers * self.directions)
        of_input, of_state, *rest = self.params[at * count : (at + 1) * count]
        biases = rest[:2] if self.has_biases else (None, None)
        return (of_input, biases[0]), (of_state, biases[1], *(rest[2:] if self.has_biases else rest))


def _sequence(step: StepRule) -> Callable[..., State]:
    """A function like torch.lstm: (outputs of the last layer, then the last state of every layer)."""

    def run(*args: Any, **kwargs: Any) -> State:
        call = _Call(*args, **kwargs)
        values, ends = call.input.transpose(0, 1) if call.batch_first else call.input, []
        for layer in range(call.num_layers):
            if layer and call.dropout and call.train:
                values = F.dropout(values, call.dropout)
            sides = [_side(step, call, values, layer * call.directions + side) for side in range(call.directions)]
            values = torch.cat([outputs for outputs, _ in sides], -1)
            ends += [end for _, end in sides]
        last = (torch.stack(states) for states in zip(*ends, strict=True))
        return (values.transpose(0, 1) if call.batch_first else values), *last

    return run


def _side(step: StepRule, call: _Call, values: Tensor, at: int) -> tuple[Tensor, State]:
    """One direction of one layer: (outputs, last state)."""
    of_input, of_state = call.weights(at)
    backwards = call.bidirectional and at % 2 == 1
    state, outputs = tuple(each[at] for each in call.states), []
    moments = F.linear(values, *of_input).unbind(0)
    for moment in reversed(moments) if backwards else moments:
        state = step(moment, state, *of_state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


# --- cells ----------------------------------------------------------------------------------------------------------


def _cell(step: StepRule) -> Callable[..., Any]:
    """A function like torch.lstm_cell: one step, to a state like the one it is given."""

    def run(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        alone = isinstance(hx, Tensor)
        state = step(F.linear(input, w_ih, b_ih), (hx,) if alone else tuple(hx), w_hh, b_hh)
        return state[0] if alone else state

    return run


# --- which form replaces which --------------------------------------------------------------------------------------

RECURRENT_FORMS: dict[Any, Callable[..., Any]] = {
    torch.lstm: _sequence(_lstm_step),
    torch.gru: _sequence(_gru_step),
    torch.rnn_tanh: _sequence(_tanh_step),
    torch.rnn_relu: _sequence(_relu_step),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_tanh_step),
    torch.rnn_relu_cell: _cell(_relu_step),
}


def _address(tensor: Tensor) -> int:
    """Zero for a tensor of torch.func, which has no address of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


# With cuDNN, nn.RNNBase moves its weights into one block of memory before every pass, and asks for their addresses.
# A plain form needs no block, and the weights stay where they are.
BLOCK_FORMS: dict[Any, Callable[..., Any]] = {
    Tensor.data_ptr: _address,
    torch._cudnn_rnn_flatten_weight: lambda *args, **kwargs: None,
}
