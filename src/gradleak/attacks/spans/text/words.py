"""What a place is trained to say: the last token of a text, hidden words, tags; read off the output side.

The last token of a text is the input of nothing that is trained, but it is the label of the place before it. Behind
the last trained map everything happens place by place, so with the inputs a_p of that map known,

    dL/dW = sum_p e_p a_p^T      gives e_p = N_p^T (sum_v s_pv w_v - w_label) / count

for every place: s are the model's probabilities, w the rows of the output layer, N_p the derivative of what lies
between. So w_label is known up to a scale, and the token is the one whose row has this direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradleak.attacks.spans.text.readers import Passes, Readers
from gradleak.core.tree import Params
from gradleak.parts.row_space import module_calls
from gradleak.scenario.task import Task

FITTED = 1e-2  # share of the gradient that known rows may leave open
SILENT = 1e-4  # of the largest delta: a smaller one is that of a place without a label
CLEAR = 0.25  # angles: that of the label is at most this share of the next token's
RANK = 1e-6  # relative: smaller singular values of a norm's derivative are zero
EQUAL = 1e-9  # relative: rows that differ by less are the same
AT_ONCE = 64  # cotangents in a backward pass


@dataclass(frozen=True, eq=False)
class OutputSide:
    """The layer that scores tokens, `head`, and the last trained map before it."""

    head: str
    weight: Tensor  # (tokens, width)
    last: str
    gradient: Tensor  # of the last map, (outputs, inputs)

    @staticmethod
    def of(task: Task, readers: Readers, gradient: Params, weights: Params, tokens: int) -> OutputSide | None:
        """None where the model has no such layers, or the update does not hold them."""
        calls = [call for call in module_calls(task, task.blank(2)) if call.name]
        scores = [call.name for call in calls if _scores(task.model.get_submodule(call.name), call.output, tokens)]
        if not scores:
            return None
        head: nn.Linear = task.model.get_submodule(scores[-1])  # type: ignore[assignment]
        able = [
            reader
            for reader in readers.context
            if reader.module != scores[-1] and len(reader.entry.layers) == 1 and reader.entry.kind == "linear"
        ]
        if not able:
            return None
        entry = able[-1].entry
        observed = gradient[entry.weights[0]].double().cpu()
        names = {id(value): name for name, value in task.model.named_parameters()}
        weight = weights.get(names[id(head.weight)], head.weight.detach())
        return OutputSide(scores[-1], weight.double().cpu(), entry.layers[0], observed.T if entry.turned else observed)


def _scores(module: nn.Module, output: object, tokens: int) -> bool:
    return (
        isinstance(module, nn.Linear)
        and isinstance(output, Tensor)
        and output.dim() == 3
        and output.shape[-1] == tokens == module.out_features
    )


Text = tuple[Passes, Tensor]
"""Its ids, and the passes for its layout."""


def labels_of(side: OutputSide, texts: Sequence[Text], wanted: Sequence[Tensor]) -> list[Tensor]:
    """For every text the labels of the wanted places; -1 where a place has none, or none that is clear."""
    wanted = [passes.start + places for (passes, _), places in zip(texts, wanted, strict=True)]
    texts = [_from_the_start(*text) for text in texts]
    rows = [passes.rows(ids[None], [side.last])[side.last][0].double().cpu() for passes, ids in texts]
    table = torch.cat(rows)  # (places, inputs)
    lengths = table.norm(dim=1, keepdim=True)  # those of first tokens can be a thousand times those of others
    inverse = torch.linalg.pinv((table / lengths).T, rtol=EQUAL)  # texts that begin alike have equal rows
    deltas = (inverse @ side.gradient.T) / lengths  # (places, outputs)
    if float((side.gradient.T - table.T @ deltas).norm()) > FITTED * float(side.gradient.norm()):
        return [torch.full_like(places, -1) for places in wanted]
    loud = SILENT * deltas.norm(dim=1).max()
    found, start = [], 0
    for (passes, ids), places in zip(texts, wanted, strict=True):
        own = deltas[start : start + len(ids)][places]
        start += len(ids)
        labels = torch.full_like(places, -1)
        heard = own.norm(dim=1) > loud
        if bool(heard.any()):
            labels[heard] = _labels(side, passes, ids, places[heard], own[heard])
        found.append(labels)
    return found


def _from_the_start(passes: Passes, ids: Tensor) -> Text:
    """With the padding before the text: its last place has a label, the first token."""
    padding = ids.new_full((passes.start,), passes.padding)
    return replace(passes, start=0), torch.cat([padding, ids])


def _labels(side: OutputSide, passes: Passes, ids: Tensor, places: Tensor, deltas: Tensor) -> Tensor:
    hidden, slopes = _behind(side, passes, ids, places)  # (places, width), (places, width, outputs)
    head = side.weight
    module: nn.Linear = passes.task.model.get_submodule(side.head)  # type: ignore[assignment]
    scores = hidden @ head.T + (0 if module.bias is None else module.bias.detach().double().cpu())
    labels = []
    for mean, slope, delta in zip(scores.softmax(-1) @ head, slopes, deltas, strict=True):
        back = torch.linalg.pinv(slope.T, rtol=RANK)  # (width, outputs)
        seen = back @ slope.T  # onto what the norm lets through
        aim = nn.functional.normalize(back @ delta, dim=0)
        directions = nn.functional.normalize((mean - head) @ seen.T, dim=1)
        angles = (1 - directions @ aim).clamp_min(0)
        (best, following), ids_ = angles.topk(2, largest=False)
        labels.append(int(ids_[0]) if float(best) <= CLEAR * float(following) else -1)
    return torch.tensor(labels)


def _behind(side: OutputSide, passes: Passes, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """What the output layer sees at these places, and its derivative by the last map's outputs there."""
    outputs: list[Tensor] = []

    def cut(module: nn.Module, args: object, output: Tensor) -> Tensor:
        outputs.append(output.detach().requires_grad_())
        return outputs[-1]

    handle = passes.task.model.get_submodule(side.last).register_forward_hook(cut)
    try:
        with torch.enable_grad():
            hidden = passes.through(ids[None], side.head)[0, passes.start + places]  # (places, width)
    finally:
        handle.remove()
    eye = torch.eye(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
    pieces = []
    for part in eye.split(AT_ONCE):
        slopes = torch.autograd.grad(
            hidden, outputs[-1], part[:, None].expand(-1, *hidden.shape), is_grads_batched=True, retain_graph=True
        )[0]
        table = slopes.reshape(len(part), -1, slopes.shape[-1])  # one text: (cotangents, places, outputs)
        pieces.append(table[:, passes.start + places])
    return hidden.detach().double().cpu(), torch.cat(pieces).movedim(1, 0).double().cpu()
