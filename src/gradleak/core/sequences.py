"""Rows of whole numbers side by side: edit distances, common parts, and ROUGE.

Entries below zero are holes: places without a token. A hole equals nothing, and no pair of neighbours spans one.
ROUGE: Lin, ROUGE: A Package for Automatic Evaluation of Summaries, ACL workshop 2004.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**22  # entries of a table at once


def compacted(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(N, L) with the holes of each row moved to its end, and how many entries are none, (N,)."""
    order = (ids < 0).to(torch.uint8).sort(dim=-1, stable=True).indices
    return ids.gather(-1, order), (ids >= 0).sum(-1)


def pairwise_edits(first: Tensor, second: Tensor) -> Tensor:
    """Levenshtein distance of every pair of rows, (n, m): the fewest insertions, deletions and replacements.

    One line of the table follows from the one above. With best[k] = min(D[i-1, k] + 1, D[i-1, k-1] + (a_i != b_k)),

        D[i, j] = min over k <= j of best[k] + j - k

    so that a running minimum of best[k] - k gives a whole line for all pairs at once.
    """
    (ones, lengths), (others, ends) = compacted(first), compacted(second)
    size = max(1, BLOCK // max(1, others.numel()))
    blocks = zip(ones.split(size), lengths.split(size), strict=True)
    return torch.cat([_edits(rows, each, others, ends) for rows, each in blocks])


def _edits(first: Tensor, lengths: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    count, others, width = len(first), len(second), second.shape[1]
    steps = torch.arange(width + 1, device=first.device, dtype=torch.int32)
    at = ends.expand(count, others)[..., None]
    line = steps.expand(count, others, width + 1)
    result = line.gather(-1, at)
    for place in range(first.shape[1]):
        other = (first[:, place, None, None] != second).to(torch.int32)  # (count, others, width)
        best = line + 1
        best[..., 1:] = torch.minimum(best[..., 1:], line[..., :-1] + other)
        line = (best - steps).cummin(-1).values + steps
        result = torch.where((lengths == place + 1)[:, None, None], line.gather(-1, at), result)
    return result[..., 0]


def longest_common(first: Tensor, second: Tensor) -> Tensor:
    """Length of the longest common subsequence of rows in pairs, (N,)."""
    line = first.new_zeros(len(first), second.shape[1] + 1)
    for place in range(first.shape[1]):
        token = first[:, place, None]
        equal = ((token == second) & (token >= 0)).to(line)
        grown = line.clone()
        grown[:, 1:] = torch.maximum(line[:, 1:], line[:, :-1] + equal)
        line = grown.cummax(-1).values
    return line[:, -1]


def common(first: Tensor, second: Tensor) -> Tensor:
    """Entries that rows in pairs have in common, each as often as both have it, (N,)."""
    width = max(first.shape[1], second.shape[1])
    keys = torch.cat([_numbered(first, width), _numbered(second, width)], -1).sort(-1).values
    return ((keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] >= 0)).sum(-1)


def pairwise_common(first: Tensor, second: Tensor) -> Tensor:
    """The same for every pair of rows, (n, m)."""
    width = max(first.shape[1], second.shape[1])
    keys = [_numbered(ids, width) for ids in (first, second)]
    shared = keys[0].unique()
    shared = shared[(shared >= 0) & torch.isin(shared, keys[1])]
    if not len(shared):
        return first.new_zeros(len(first), len(second))
    marks = []
    for each in keys:
        place = torch.searchsorted(shared, each).clamp_max(len(shared) - 1)
        row, column = (shared[place] == each).nonzero(as_tuple=True)
        mark = torch.zeros(len(each), len(shared), device=first.device)
        mark[row, place[row, column]] = 1
        marks.append(mark)
    return (marks[0] @ marks[1].T).round().long()


def _numbered(ids: Tensor, width: int) -> Tensor:
    """Entries made different by how many equal ones stand before them in their row; holes are -1."""
    values, order = ids.sort(dim=-1, stable=True)
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[:, 1:] = values[:, 1:] != values[:, :-1]
    before = place - (place * starts).cummax(-1).values if ids.shape[1] else place
    keys = torch.where(values < 0, -1, values * width + before)
    return torch.empty_like(keys).scatter(-1, order, keys)


def rouge(found: Tensor, truth: Tensor, size: int) -> Tensor:
    """ROUGE-`size` of rows in pairs, (N,): F1 of the common n-grams, 0 where one of the two has none."""
    grams = _grams(found, truth, size)
    return _f1(common(*grams), *((each >= 0).sum(-1) for each in grams))


def rouge_l(found: Tensor, truth: Tensor) -> Tensor:
    """ROUGE-L of rows in pairs, (N,): F1 of the longest common subsequence."""
    return _f1(longest_common(found, truth), (found >= 0).sum(-1), (truth >= 0).sum(-1))


def _grams(first: Tensor, second: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The n-grams of both as numbers of one list; -1 where a hole is among the entries, or rows are too short."""
    if min(first.shape[1], second.shape[1]) < size:
        blank = first.new_full((len(first), 1), -1)
        return blank, blank
    windows = first.unfold(-1, size, 1), second.unfold(-1, size, 1)  # (N, places, size)
    numbers = torch.cat([each.reshape(-1, size) for each in windows]).unique(dim=0, return_inverse=True)[1]
    one, other = numbers.split([each.shape[0] * each.shape[1] for each in windows])
    return _filled(one, windows[0]), _filled(other, windows[1])


def _filled(numbers: Tensor, windows: Tensor) -> Tensor:
    return numbers.reshape(windows.shape[:2]).masked_fill((windows < 0).any(-1), -1)


def _f1(both: Tensor, found: Tensor, truth: Tensor) -> Tensor:
    return 2 * both.double() / (found + truth).clamp_min(1)
