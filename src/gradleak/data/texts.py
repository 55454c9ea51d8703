"""Texts as a language model takes them: ids of a tokenizer, padded to one length, with the words for the report.

A tokenizer is any object whose `encode(text)` gives ids, or something with `.ids`: those of `tokenizers` and of
`transformers` do. `Bytes` is built in. Messages name lines and counts, and never quote a text: texts are private.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradleak.data.fetch import DataError
from gradleak.data.records import MOST_CLASSES, selected
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Category, Mask, Tokens

TEXT_SUFFIXES = (".txt",)
TEXT_COLUMNS, LABEL_COLUMNS = ("text", "sentence", "content", "review", "document"), ("label", "labels", "target", "y")
SPACES = ("\u0120", "\u2581")  # how BPE and SentencePiece write a leading space
INSIDE = "##"  # how WordPiece marks a piece that continues a word
NAMED = 4  # lines that a note names


class Bytes:
    """The built-in tokenizer: a token is a byte of UTF-8, its id the byte + 1, and 0 fills short texts."""

    padding = 0
    size = 257

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode("utf-8")]

    def words(self) -> tuple[str, ...]:
        return ("", *(chr(byte) if 32 <= byte < 127 or byte == 10 else f"\\x{byte:02x}" for byte in range(256)))


Tokenizer: TypeAlias = Any
"""Has `encode(text)`, which gives ids or something with `.ids`."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Tokenised texts: `x` int64 (N, length), filled at the end, and `lengths` (N,): how many ids each has.

    filler   the id that fills short texts; None: there is none, and `fields` needs the padding of the task
    words    the text of each id; empty: not known
    y        classes int64 (N,), if the texts have labels, and their `names`
    notes    what was cut or left out, in words
    assumed  nobody named a tokenizer: the ids are bytes
    """

    x: Tensor
    lengths: Tensor
    source: str
    filler: int | None = None
    words: tuple[str, ...] = ()
    y: Tensor | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: bool = False

    def __repr__(self) -> str:  # never the texts: they are private
        classes = "" if self.y is None else f", {len(self.names)} classes"
        return f"Texts({len(self)} of up to {self.length} tokens{classes}, {self.source!r})"

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Texts:
        """Some of the texts, as `Texts`; one index gives one text, still with its leading dimension."""
        chosen = selected(rows, self.x.device)
        y = None if self.y is None else self.y[chosen]
        return replace(self, x=self.x[chosen], lengths=self.lengths[chosen], y=y)

    @property
    def length(self) -> int:
        return self.x.shape[1]

    @property
    def mask(self) -> Tensor:
        """1 where a text has a token, 0 where it is filled, int64 (N, length)."""
        return (torch.arange(self.length) < self.lengths[:, None]).long()

    @property
    def kind(self) -> Tokens:
        """The kind of `x`."""
        return Tokens(padding=self.filler, words=self.words)

    @property
    def classes(self) -> int | None:
        return len(self.names) or None

    def batch(self, indices: int | slice | Sequence[int] | Tensor) -> dict[str, Tensor]:
        """The private tensors of one client: `{"x": ..., "attention_mask": ..., "y": ...}`."""
        chosen = self[indices]
        labels = {} if chosen.y is None else {"y": chosen.y}
        return {"x": chosen.x, "attention_mask": chosen.mask, **labels}

    def fitted(self, length: int, filler: int | None = None) -> Texts:
        """The same in another length: filled up (by `filler`, or their own), or cut, which is noted."""
        filler = self.filler if filler is None else filler
        cut, short = int((self.lengths > length).sum()), bool((self.lengths < length).any())
        if short and filler is None:
            raise DataError(
                f"{self.source}: texts are shorter than {length} tokens, and no id is named to fill them. Give "
                "padding=, or kind=gradleak.kinds.Tokens(padding=...) to the task."
            )
        x = torch.nn.functional.pad(self.x[:, :length], (0, max(0, length - self.length)))
        lengths = self.lengths.clamp_max(length)
        filled = torch.arange(length) >= lengths[:, None]
        x = x.masked_fill(filled, filler or 0)
        notes = (f"{cut} of {len(self)} texts are longer than {length} tokens and were cut.",) if cut else ()
        return replace(self, x=x, lengths=lengths, filler=filler, notes=(*self.notes, *notes))

    def fields(self, wanted: Mapping[str, Field]) -> dict[str, Tensor]:
        """The tensors that a task takes, by the names of its fields: ids in its length, masks, labels."""
        field = wanted["x"]
        if not isinstance(field.kind, Tokens):
            raise DataError(f"{self.source} holds texts, and the task's x is of kind {field.kind.name!r}.")
        if self.assumed and field.classes != Bytes.size:
            raise DataError(
                f"{self.source}: no tokenizer was named, so ids are bytes ({Bytes.size} of them), but the vocabulary "
                f"of the task has {field.classes}. Name its tokenizer: tokenizer=, or --tokenizer FILE.py:NAME."
            )
        fitted = self.fitted(field.shape[-1], field.kind.padding)
        for note in fitted.notes[len(self.notes) :]:
            warnings.warn(f"{self.source}: {note}", stacklevel=2)
        if bool((fitted.lengths < fitted.length).any()) and field.kind.padding is None:
            raise DataError(
                f"{self.source}: short texts are filled with id {fitted.filler}, but the task names no padding, so "
                f"filled places would count as private. Give kind=gradleak.kinds.Tokens(padding={fitted.filler}) to "
                "the task."
            )
        return {name: fitted._tensor(name, each) for name, each in wanted.items()}

    def _tensor(self, name: str, field: Field) -> Tensor:
        known: dict[str, Callable[[], Tensor]] = {
            "x": lambda: self.x,
            "token_type_ids": lambda: torch.zeros_like(self.x),
            "position_ids": lambda: torch.arange(self.length).expand_as(self.x).clone(),
        }
        if name in known:
            return known[name]()
        if isinstance(field.kind, Mask):
            return self.mask
        if isinstance(field.kind, Category) and not field.shape and self.y is not None:
            return self.y
        reason = "no labels: give a CSV with a text and a label" if field.kind.name == "category" else "ids alone"
        raise DataError(
            f"{self.source}: the task needs {name!r} ({field.kind.name}), and these texts have {reason}; or give "
            f"tensors: {{'x': texts.x, {name!r}: ...}}."
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def texts(
    source: str | os.PathLike[str] | Iterable[str] | Mapping[str, Any],
    *,
    tokenizer: Tokenizer = None,
    length: int | None = None,
    padding: int | None = None,
    text: str = "",
    label: str = "",
) -> Texts:
    """Texts of a file (one a line, or a CSV of text and label), of a list, or of a batch that is tokenised already.

    source      a path, texts, or a mapping with "input_ids", as tokenizers of Hugging Face give it
    tokenizer   has `encode(text)`; "bytes" or None: the built-in one, `Bytes`
    length      of all texts: longer ones are cut, shorter ones filled; None: that of the longest
    padding     the id that fills short texts; None: the tokenizer's own, if it names one
    text, label   columns of a CSV, whose first line names them; default: those called text or sentence, and label

        gl.data.texts("letters.txt", tokenizer=AutoTokenizer.from_pretrained("gpt2"), length=64)
    """
    if length is not None and length < 1:
        raise DataError(f"length is {length}. Give at least 1, or None for that of the longest text.")
    if isinstance(source, Mapping):
        return _shaped(_tokenised(source, tokenizer, padding), length)
    labels: list[str] | None = None
    numbers: Sequence[int]
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        origin, (numbers, lines, labels) = path.name, _read(path, text, label)
    else:
        lines = [*source]
        origin, numbers = f"{len(lines)} texts", range(1, len(lines) + 1)
    kept = [place for place, line in enumerate(lines) if line.strip()]
    empty = len(lines) - len(kept)
    if not kept:
        raise DataError(f"{origin} holds no texts. Give one text a line.")
    encode, assumed = Bytes() if tokenizer in (None, "bytes") else tokenizer, tokenizer is None
    ids = [_ids(encode, lines[place], f"{origin}, text {numbers[place]}") for place in kept]
    notes = [f"{empty} empty lines were left out."] if empty else []
    notes += _unknown(encode, ids, [numbers[place] for place in kept])
    filler = padding if padding is not None else _padding(encode)
    y, names = _classes([labels[place] for place in kept], origin) if labels is not None else (None, ())
    found = _stacked(ids, origin, filler)
    return _shaped(replace(found, words=words(encode), y=y, names=names, notes=tuple(notes), assumed=assumed), length)


def _shaped(found: Texts, length: int | None) -> Texts:
    return found if length is None else found.fitted(length)


def _stacked(ids: Sequence[Sequence[int]], origin: str, filler: int | None) -> Texts:
    """Ids of different lengths in one tensor. Without a filler places are 0, and `fields` asks for one."""
    lengths = torch.tensor([len(each) for each in ids])
    x = torch.full((len(ids), int(lengths.max())), filler or 0)
    for row, each in enumerate(ids):
        x[row, : len(each)] = torch.tensor(each)
    return Texts(x, lengths, origin, filler)


def _read(path: Path, text: str, label: str) -> tuple[Sequence[int], list[str], list[str] | None]:
    """The lines of a text file, or the texts and labels of a CSV, with their numbers."""
    if not path.is_file():
        raise DataError(f"There is no file {path} (looked from {Path.cwd()}). Give a file with one text a line.")
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is not UTF-8 text (byte {problem.start}). Save it in UTF-8.") from None
    if path.suffix.lower() not in (".csv", ".tsv"):
        lines = content.split("\n")
        lines = [line.rstrip("\r") for line in (lines[:-1] if not lines[-1] else lines)]
        return range(1, len(lines) + 1), lines, None
    reader = csv.reader(io.StringIO(content, newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    head, *rows = [row for row in reader if any(cell.strip() for cell in row)] or [[]]
    if any(len(row) != len(head) for row in rows):
        raise DataError(f"{path}: every line needs as many cells as the first one. Quote texts that contain commas.")
    place, mark = _column(head, text, TEXT_COLUMNS, path), _column(head, label, LABEL_COLUMNS, path)
    if place is None:
        raise DataError(
            f"{path}: none of the columns in its first line is called {', '.join(TEXT_COLUMNS)}. Name it with text=, "
            "or rename it."
        )
    labels = None if mark is None else [row[mark].strip() for row in rows]
    return range(2, len(rows) + 2), [row[place] for row in rows], labels


def _column(head: Sequence[str], named: str, usual: Sequence[str], path: Path) -> int | None:
    """The place of a column; None: there is none of the usual ones. A file without a head is never quoted."""
    names = [cell.strip() for cell in head]
    if named and named not in names:
        raise DataError(f"{path} has no column {named!r} in its first line.")
    return names.index(named) if named else next((names.index(each) for each in usual if each in names), None)


def _classes(labels: Sequence[str], origin: str) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as whole numbers: by value if they are numbers, else in alphabetical order."""
    if missing := sum(not label for label in labels):
        raise DataError(f"{origin}: {missing} of {len(labels)} texts have no label. Fill them in, or leave them out.")
    names = sorted(set(labels), key=lambda name: (int(name) if name.isdecimal() else -1, name))
    if len(names) > max(MOST_CLASSES, len(labels) // 2):
        raise DataError(f"{origin}: {len(names)} different labels of {len(labels)} texts are no classes. Give label=.")
    if all(name.isdecimal() for name in names):  # classes that do not occur have their places
        names = [str(number) for number in range(int(names[-1]) + 1)]
    return torch.tensor([names.index(label) for label in labels]), tuple(names)


def _tokenised(batch: Mapping[str, Any], tokenizer: Tokenizer, padding: int | None) -> Texts:
    """A batch of ids, with an attention mask where it is padded already."""
    if "input_ids" not in batch:
        raise DataError(f"A tokenised batch needs input_ids; given {', '.join(batch) or 'nothing'}.")
    rows = [torch.as_tensor(row).tolist() for row in batch["input_ids"]]
    if not rows or not all(rows):
        raise DataError("input_ids holds no texts, or empty ones. Give at least one id for each text.")
    if "attention_mask" in batch:
        masks = [torch.as_tensor(row).tolist() for row in batch["attention_mask"]]
        if any(mask != sorted(mask, reverse=True) for mask in masks):
            raise DataError("attention_mask is not 1 up to the end of each text. Pad on the right (padding_side).")
        rows = [row[: sum(mask)] for row, mask in zip(rows, masks, strict=True)]
    filler = padding if padding is not None else _padding(tokenizer)
    found = _stacked(rows, f"{len(rows)} tokenised texts", filler)
    labels = next((batch[name] for name in LABEL_COLUMNS if name in batch), None)
    y = None if labels is None else torch.as_tensor(labels)
    known = () if tokenizer is None else words(tokenizer)
    if y is None or y.dim() != 1:  # labels of a language model are its ids again
        return replace(found, words=known)
    return replace(found, words=known, y=y.long(), names=tuple(map(str, range(int(y.max()) + 1))))


# --- tokenizers -------------------------------------------------------------------------------------------------------


def _ids(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    try:
        found = tokenizer.encode(text)
    except AttributeError:
        raise DataError(
            f"The tokenizer is a {type(tokenizer).__name__} without encode(text). Give one of tokenizers or "
            "transformers, or 'bytes'."
        ) from None
    ids = [int(number) for number in getattr(found, "ids", found)]
    if not ids:
        raise DataError(f"{where}: the tokenizer gives no ids for it. Leave it out, or use another tokenizer.")
    return ids


def _padding(tokenizer: Tokenizer) -> int | None:
    """The id of padding that a tokenizer names: ours, of transformers, or of tokenizers (with padding enabled)."""
    for name in ("padding", "pad_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, Mapping):
            value = value.get("pad_id")
        if isinstance(value, int):
            return value
    return None


def _unknown(tokenizer: Tokenizer, ids: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[str]:
    """Texts with characters that the tokenizer does not know, where it has an id for these."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    named = getattr(getattr(tokenizer, "model", None), "unk_token", None)  # of tokenizers
    if unknown is None and isinstance(named, str):
        unknown = tokenizer.token_to_id(named)
    if unknown is None:
        return []
    counts = {number: row.count(unknown) for number, row in zip(numbers, ids, strict=True) if unknown in row}
    if not counts:
        return []
    some = ", ".join(map(str, list(counts)[:NAMED])) + (", ..." if len(counts) > NAMED else "")
    return [f"{sum(counts.values())} tokens are unknown to the tokenizer (texts {some}): nobody can recover those."]


def words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The text of each id, with its leading space; empty: the tokenizer names none."""
    if isinstance(tokenizer, Bytes):
        return tokenizer.words()
    if not hasattr(tokenizer, "get_vocab"):
        return ()
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    pieces = {number: piece for piece, number in vocabulary.items()}
    inside = any(piece.startswith(INSIDE) for piece in vocabulary)
    known = (pieces.get(number, "") for number in range(max(pieces, default=-1) + 1))
    return tuple(_word(piece, inside) for piece in known)


def _word(piece: str, inside: bool) -> str:
    if inside:
        return piece.removeprefix(INSIDE) if piece.startswith(INSIDE) else f" {piece}"
    for mark in SPACES:
        piece = piece.replace(mark, " ")
    return piece.replace("\u010a", "\n")  # a line feed in byte-level BPE


# --- the names --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSource:
    """Texts that the package brings: a file beside this module, whose first lines (#) name its source."""

    description: str
    licence: str
    file: str
    needs: str = ""

    def where(self) -> Path | None:
        place = Path(__file__).parent / self.file
        return place if place.is_file() else None

    def lines(self) -> list[str]:
        content = (Path(__file__).parent / self.file).read_text(encoding="utf-8")
        return [line for line in content.splitlines() if not line.startswith("#")]


TEXTS: dict[str, TextSource] = {
    "moby-dick-samples": TextSource(
        description="61 sentences from the opening of Moby-Dick (Melville 1851)",
        licence="public domain",
        file="moby_dick.txt",
    ),
}
