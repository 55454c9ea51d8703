"""What an audit found: rows, the table, the verdict, the images. Nothing here runs an attack.

SKELETON: the interface below holds; bodies follow.

A row of `rows.jsonl` (one line per cell and target; numbers are finite or null):

version      1
cell         key of the cell, 16 hexadecimal digits; names arrays/<cell>.safetensors
status       "done", or "failed": then `target` is null, `error` one line and `traceback` the rest; no scores
control      true where the cell is only the positive control and not part of the grid
attack, defence, form, round, seed, examples        the cell. defence "none"; form "undefended", "naive", "masked", "adaptive"
targets, target, observation                        how many targets the cell has, which one this is, its key
knows        the threat model's letter, such as "C (training details)"
scores       {"psnr": [...], "ssim": [...], "mse": [...], "lpips": [...] or absent, "rank": [...]}   one per example
gallery_size [...]          chance of rank 1 is 1 / gallery_size
hits         {"ssim>0.5": [true, ...], "psnr>18": ..., "psnr>20": ..., "rank1": ..., "recovered": ...}
labels       {"multiset_accuracy": ..., "matched": ..., ...}     empty where there are none
baselines    {"mid-grey": {"psnr": [...], ...}, "mean image": ..., "nearest other": ..., "unrelated update": {...}}
             "unrelated update" also has "rank1" and "recovered": the same attack on somebody else's update
match, match_start, objective, restart              of the chosen restart
diverged, converged                                 true or false
checks       [{"name", "severity", "text", "fix"}]  severity "error", "warning", "note"
analyses     {name: number}
seconds      of the cell, divided by its targets
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

Row = dict[str, Any]


class Rate(NamedTuple):
    """A share or mean with its 95 % interval by bootstrap over targets; `count` values went in."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Summary:
    """One line of the table: one attack against one defence in one form, all targets and seeds together."""

    attack: str
    defence: str
    form: str
    round: int
    examples: int
    cells: tuple[str, ...]  # keys, one per seed
    targets: int
    seeds: int
    word: str  # the verdict's word for this line alone
    recovered: Rate
    excess: Rate  # recovered minus the no-gradient baseline
    rates: dict[str, Rate]  # "ssim>0.5", "psnr>18", "psnr>20", "rank1"
    chance: float  # of rank 1
    means: dict[str, float]  # of psnr, ssim, mse, lpips, labels
    medians: dict[str, float]
    worst: dict[str, float]  # of the best-recovered image: the worst case for a client
    baseline: dict[str, float]  # of the unrelated update: psnr, ssim, rank1, recovered
    match: float  # median
    converged: float
    diverged: float
    seconds: float
    errors: tuple[str, ...] = ()  # of failed cells


@dataclass(frozen=True)
class Verdict:
    """`word`: "leaks", "leaks in part", "not shown to leak", "inconclusive", "void". `rule` says how it was reached."""

    word: str
    paragraph: str
    rule: str


@dataclass(frozen=True)
class Control:
    """The positive control: undefended, one example, the first attack. If it fails, the run shows nothing."""

    passed: bool
    psnr: float  # median over its targets
    text: str
    cell: str


@dataclass(frozen=True, eq=False)
class AuditResult:
    """Rows and images of a run, in memory or in a folder. The folder holds private images: treat it as the data itself."""

    rows: list[Row]
    settings: dict[str, Any]  # what run.toml holds
    environment: dict[str, Any]
    folder: Path | None = None
    _arrays: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summaries(self) -> list[Summary]: raise NotImplementedError
    @property
    def verdict(self) -> Verdict: raise NotImplementedError
    @property
    def verdicts(self) -> dict[str, Verdict]: raise NotImplementedError  # per defence name
    @property
    def positive_control(self) -> Control: raise NotImplementedError
    @property
    def complete(self) -> bool: raise NotImplementedError  # every planned cell has rows
    @property
    def failed(self) -> list[Row]: raise NotImplementedError
    def table(self, format: str = "text") -> str: raise NotImplementedError
    def compare(self, other: AuditResult) -> Any: raise NotImplementedError  # has .table(format), str()
    def images(self, cell: str) -> dict[str, Tensor]: raise NotImplementedError  # "true", "found": (targets, examples, C, H, W) in [0, 1], matched pair by pair
    def trace(self, cell: str) -> dict[str, Tensor]: raise NotImplementedError  # "step" (P,), "match", "objective" (P, targets), chosen restart
    def report(self, path: str | Path) -> Path: raise NotImplementedError
    @staticmethod
    def load(folder: str | Path) -> AuditResult: raise NotImplementedError
