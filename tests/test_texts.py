"""Texts: their scores, their loaders, and what is printed of them, from the file to the verdict."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import gradleak as gl
from gradleak.cli import app
from gradleak.cli.references import load_object
from gradleak.core.files import BadRun, without_values
from gradleak.core.sequences import common, longest_common, pairwise_common, pairwise_edits, rouge, rouge_l
from gradleak.data import DataError, Texts, texts
from gradleak.data.texts import Bytes
from gradleak.report import render
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Tokens


def rows(*texts_: list[int], length: int = 8) -> Tensor:
    """Texts of different lengths, filled with -1."""
    return torch.tensor([text + [-1] * (length - len(text)) for text in texts_])


# --- sequences --------------------------------------------------------------------------------------------------------


def edits_by_hand(a: list[int], b: list[int]) -> int:
    """Wagner and Fischer's table, one entry after the other."""
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, j in itertools.product(range(1, len(a) + 1), range(1, len(b) + 1)):
        table[i, j] = min(
            table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
        )  # fmt: skip
    return table[len(a), len(b)]


def test_edits_are_those_of_the_plain_table() -> None:
    draws = torch.Generator().manual_seed(0)
    first, second = (torch.randint(-1, 4, (12, 9), generator=draws) for _ in range(2))
    first[0], second[3] = -1, -1  # empty texts
    plain = [[edits_by_hand(*([t for t in text.tolist() if t >= 0] for text in (a, b))) for b in second] for a in first]
    assert pairwise_edits(first, second).tolist() == plain
    kitten, sitting = ([ord(letter) for letter in word] for word in ("kitten", "sitting"))
    assert pairwise_edits(rows(kitten), rows(sitting)).tolist() == [[3]]


def test_large_tables_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, 5, (7, 6), generator=draws), torch.randint(0, 5, (4, 8), generator=draws)
    whole = pairwise_edits(first, second)
    monkeypatch.setattr("gradleak.core.sequences.BLOCK", 1)
    assert torch.equal(pairwise_edits(first, second), whole)


def test_common_entries_count_as_often_as_both_have_them() -> None:
    first, second = rows([5, 5, 5, 2], [1, 2, 3], []), rows([5, 2, 5, 9], [3, 2, 1], [1])
    assert common(first, second).tolist() == [3, 3, 0]
    assert pairwise_common(first, second).tolist() == [[3, 1, 0], [1, 3, 1], [0, 0, 0]]
    assert pairwise_common(first[2:], second[:1]).tolist() == [[0]]


def test_the_longest_common_subsequence() -> None:
    first, second = rows([1, 2, 3, 4, 1], [1, 2, 3], [4, 3, 2, 1]), rows([3, 4, 1, 2, 1, 3], [1, 3], [1, 2, 3, 4])
    assert longest_common(first, second).tolist() == [3, 2, 1]


ROUGE: list[tuple[list[int], list[int], tuple[float, float, float]]] = [
    # found, true, ROUGE-1, -2 and -L of torchmetrics 1.9 (functional.text.rouge_score) on "w5 w3 ..."
    ([5, 3, 5, 8, 1, 2, 9], [5, 8, 5, 3, 1, 2, 2, 4], (0.8, 0.461538, 0.533333)),
    ([1, 2, 3, 4], [1, 2, 3, 4], (1.0, 1.0, 1.0)),
    ([4, 3, 2, 1], [1, 2, 3, 4], (1.0, 0.0, 0.25)),
    ([7, 7, 7], [7, 7, 1, 7, 7], (0.75, 0.666667, 0.75)),
    ([1, 2], [3, 4, 5], (0.0, 0.0, 0.0)),
]


def test_rouge_is_that_of_torchmetrics() -> None:
    found, true, wanted = rows(*(each[0] for each in ROUGE)), rows(*(each[1] for each in ROUGE)), [e[2] for e in ROUGE]
    scores = torch.stack([rouge(found, true, 1), rouge(found, true, 2), rouge_l(found, true)], 1)
    torch.testing.assert_close(scores, torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


def test_no_pair_of_neighbours_spans_a_hole() -> None:
    assert rouge(rows([1, -1, 2]), rows([1, 2]), 2).tolist() == [0.0]
    assert rouge(torch.tensor([[1]]), torch.tensor([[1]]), 2).tolist() == [0.0], "one token has no neighbours"


# --- the kind ---------------------------------------------------------------------------------------------------------

KIND = Tokens(padding=0)
TEN = Field((10,), classes=50, kind=KIND)


def scores_of(found: list[int], true: list[int]) -> dict[str, float]:
    made = (KIND.comparable(torch.tensor([text + [0] * (10 - len(text))]), TEN) for text in (found, true))
    return {name: float(value) for name, value in KIND.scores(*made).items()}


def passed(found: list[int], true: list[int]) -> set[str]:
    scores = {name: torch.tensor([value], dtype=torch.float64) for name, value in scores_of(found, true).items()}
    return {each.name for each in KIND.thresholds if bool(each.passed(scores))}


TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 7]


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (TEXT, {"exact", "exact but the last", "in place>=90%", "whole bag", "bag>90%"}),
        ([*TEXT[:-1], 8], {"exact but the last", "in place>=90%"}),  # the last one has no loss in a causal model
        ([8, *TEXT[1:]], {"in place>=90%"}),
        (TEXT[::-1], {"whole bag", "bag>90%"}),
        ([8, 8, *TEXT[2:]], set()),
    ],
)
def test_thresholds_of_texts(found: list[int], names: set[str]) -> None:
    assert passed(found, TEXT) == names


def test_a_text_of_one_token_is_not_exact_without_it() -> None:
    assert "exact but the last" not in passed([4], [3])
    assert "exact but the last" in passed([3], [3])
    assert scores_of([], TEXT) == dict.fromkeys(("order", "bag", "head", "rouge1", "rouge2", "rougel"), 0.0)


def test_texts_are_matched_by_edits_and_looked_up_by_their_bags() -> None:
    """One token lost at the start shifts all places: still the same text by its edits, and by its bag."""
    true = torch.tensor([TEXT, [9, 9, 1, 4, 1, 5, 3, 3, 3, 3]])
    shifted = torch.tensor([[*TEXT[1:], -1]])
    distance = KIND.distance(true, shifted)
    assert float(distance[0]) == pytest.approx(0.1, abs=1e-5)
    assert float(distance[0]) < float(distance[1])
    mixed = torch.tensor([sorted(TEXT)])
    assert KIND.look_up(mixed, true).argmin() == 0
    near, far = KIND.distance(mixed, torch.tensor([[*TEXT[1:], 8]])), KIND.distance(mixed, torch.full((1, 10), 8))
    assert float(near) < float(far)


def test_equal_edits_are_told_apart_by_the_bag() -> None:
    true, found = rows([1, 2, 3, 4]), rows([4, 8, 8, 8], [8, 8, 8, 8])
    assert pairwise_edits(true, found).tolist() == [[4, 4]]
    assert KIND.distance(true, found).argmin() == 0


def test_the_bag_is_never_below_the_share_in_place() -> None:
    """So a control that looks at the bag passes for every attack that orders tokens."""
    draws = torch.Generator().manual_seed(0)
    found, true = (torch.randint(-1, 6, (300, 10), generator=draws) for _ in range(2))
    scores = KIND.scores(found, true)
    assert bool((scores["bag"] >= scores["order"]).all())
    assert (KIND.control_measure.name, KIND.headline.name) == ("bag", "order")


# --- loaders ----------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer with an unknown id, and a vocabulary as those of byte-level BPE write it."""

    unk_token_id, pad_token_id = 1, 0
    pieces = ("<pad>", "<unk>", "a", "\u0120b", "c")

    def encode(self, text: str) -> list[int]:
        known = {"a": 2, "b": 3, "c": 4}
        return [known.get(letter, 1) for letter in text if letter != " "]

    def get_vocab(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}


def test_lines_of_a_file_become_ids(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("aé\n\nabc\r\n", encoding="utf-8")
    found = texts(tmp_path / "notes.txt")
    assert found.x.tolist() == [[98, 196, 170], [98, 99, 100]]
    assert (found.lengths.tolist(), found.filler, found.assumed) == ([3, 3], 0, True)
    assert found.notes == ("1 empty lines were left out.",)
    assert "".join(found.words[token] for token in found.x[1].tolist()) == "abc"
    assert len(found.words) == Bytes.size
    assert "abc" not in repr(found)
    longer = texts(["abcde", "a"], length=3)
    assert longer.x.tolist() == [[98, 99, 100], [98, 0, 0]]
    assert longer.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert longer.notes == ("1 of 2 texts are longer than 3 tokens and were cut.",)
    assert longer.batch([0]).keys() == {"x", "attention_mask"}
    assert longer[1:].mask.tolist() == [[1, 0, 0]]


def test_any_tokenizer_with_encode_will_do(tmp_path: Path) -> None:
    found = texts(["a bc", "axa"], tokenizer=Letters())
    assert found.x.tolist() == [[2, 3, 4], [2, 1, 2]]
    assert found.words == ("<pad>", "<unk>", "a", " b", "c")
    assert found.notes == ("1 tokens are unknown to the tokenizer (texts 2): nobody can recover those.",)
    assert (found.filler, found.assumed) == (0, False)
    with pytest.raises(DataError, match="is a list without encode"):
        texts(["a"], tokenizer=[1, 2])
    with pytest.raises(DataError, match="2 texts, text 2: the tokenizer gives no ids"):
        texts(["a", "\u200b "], tokenizer=type("Silent", (), {"encode": lambda self, text: [2] * ("a" in text)})())


def test_fast_tokenizers_of_hugging_face() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "call": 1, "me": 2, "ish": 3, "##mael": 4}
    fast = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found = texts(["call me ishmael", "me"], tokenizer=fast, padding=0)
    assert found.x.tolist() == [[1, 2, 3, 4], [2, 0, 0, 0]]
    assert "".join(found.words[token] for token in found.x[0].tolist()) == " call me ishmael"
    odd = texts(["call me", "zebra me"], tokenizer=fast, padding=0)
    assert odd.notes == ("1 tokens are unknown to the tokenizer (texts 2): nobody can recover those.",)
    transformers = pytest.importorskip("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", pad_token="[UNK]")
    again = texts(wrapped(["call me ishmael", "me"], padding=True), tokenizer=wrapped)
    assert (again.x.tolist(), again.lengths.tolist()) == (found.x.tolist(), [4, 1])
    assert again.words == found.words


def test_tokenised_batches_of_any_lengths() -> None:
    ragged = texts({"input_ids": [[5, 6, 7], [8]], "labels": [1, 0]}, padding=0)
    assert (ragged.x.tolist(), ragged.lengths.tolist()) == ([[5, 6, 7], [8, 0, 0]], [3, 1])
    assert ragged.y is not None
    assert (ragged.y.tolist(), ragged.classes) == ([1, 0], 2)
    ids = torch.tensor([[5, 6], [7, 1]])
    masked = texts({"input_ids": ids, "attention_mask": torch.tensor([[1, 1], [1, 0]]), "labels": ids}, padding=9)
    assert (masked.x.tolist(), masked.lengths.tolist(), masked.y) == ([[5, 6], [7, 9]], [2, 1], None)
    with pytest.raises(DataError, match="Pad on the right"):
        texts({"input_ids": ids, "attention_mask": torch.tensor([[0, 1], [1, 1]])})
    with pytest.raises(DataError, match="needs input_ids; given x"):
        texts({"x": ids})
    with pytest.raises(DataError, match="empty ones"):
        texts({"input_ids": [[1], []]})


def test_a_csv_of_texts_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text('text,label\n"good, very good",pos\nbad,neg\n', encoding="utf-8")
    found = gl.data.load(path, tokenizer="bytes")
    assert isinstance(found, Texts)
    assert found.y is not None
    assert (found.y.tolist(), found.names, found.lengths.tolist()) == ([1, 0], ("neg", "pos"), [15, 3])
    path.write_text("stars,says\n2,fine\n0,bad\n", encoding="utf-8")
    numbered = texts(path, text="says", label="stars")
    assert numbered.y is not None
    assert (numbered.y.tolist(), numbered.names) == ([2, 0], ("0", "1", "2"))
    with pytest.raises(DataError, match="none of the columns in its first line is called text"):
        texts(path)
    with pytest.raises(DataError, match="has no column 'mood'"):
        texts(path, text="says", label="mood")
    path.write_text("text,label\nfine,\nbad,neg\n", encoding="utf-8")
    with pytest.raises(DataError, match="1 of 2 texts have no label"):
        texts(path)


def test_messages_never_quote_a_text(tmp_path: Path) -> None:
    path = tmp_path / "secret.csv"
    for content in ("secret words\nmore, secret\n", "text,label\nsecret,\n", "secret;secret\n"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError) as caught:
            texts(path)
        assert "secret" not in str(caught.value).replace("secret.csv", "")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file"):
        texts(tmp_path / "absent.txt")
    (tmp_path / "odd.txt").write_bytes(b"ab\xff\xfe")
    with pytest.raises(DataError, match=r"is not UTF-8 text \(byte 2\)"):
        texts(tmp_path / "odd.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DataError, match="holds no texts"):
        gl.data.load(tmp_path / "empty.txt")
    with pytest.raises(DataError, match="length is 0"):
        texts(["a"], length=0)
    with pytest.raises(DataError, match="is for images"):
        gl.data.load("moby-dick-samples", size=8)
    with pytest.raises(DataError, match="is for tables"):
        gl.data.load("moby-dick-samples", missing="drop")


def test_texts_that_are_built_in() -> None:
    whole, few = gl.data.load("moby-dick-samples"), gl.data.load("moby-dick-samples", split="test", limit=4)
    assert isinstance(whole, Texts)
    assert len(whole) == 61
    assert len(few) == 4
    first = "".join(whole.words[token] for token in whole.x[0, : int(whole.lengths[0])].tolist())
    assert first == "Call me Ishmael."
    assert next(line for line in gl.data.available() if line.name == "moby-dick-samples").licence == "public domain"


# --- into a task ------------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """A text classifier: the mean of the embedded tokens."""

    def __init__(self, vocabulary: int, padding: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, 8, padding_idx=padding)
        self.out = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.out(self.words(input_ids).mean(1))


def task_of(vocabulary: int = 257, padding: int | None = 0, length: int = 12) -> gl.Task:
    torch.manual_seed(0)
    ids = torch.ones(1, length, dtype=torch.long)
    like = {"input_ids": ids, "attention_mask": ids, "labels": torch.zeros(1, dtype=torch.long)}
    return gl.Task.supervised(Mean(vocabulary, padding), F.cross_entropy, like=like)


def test_texts_fit_the_length_of_a_task() -> None:
    found = texts({"input_ids": [[5, 6, 7], list(range(1, 20))], "label": [1, 0]}, padding=3)
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than 12 tokens"):
        batch = found.fields(task_of().fields)
    assert batch["x"].tolist() == [[5, 6, 7] + [0] * 9, list(range(1, 13))], "filled by the id of the task"
    assert batch["attention_mask"].sum(1).tolist() == [3, 12]
    assert batch["y"].tolist() == [1, 0]


def test_texts_that_do_not_fit_a_task_are_refused() -> None:
    short = texts(["ab", "abc"])
    with pytest.raises(DataError, match="no tokenizer was named.*the vocabulary of the task has 300"):
        short.fields(task_of(300).fields)
    with pytest.raises(DataError, match="the task names no padding"):
        short.fields(task_of(padding=None).fields)
    with pytest.raises(DataError, match="the task needs 'y' .category., and these texts have no labels"):
        short.fields(task_of().fields)
    with pytest.raises(DataError, match="no id is named to fill them"):
        texts({"input_ids": [[1], [1, 2]]}).fields(task_of(padding=None).fields)
    with pytest.raises(DataError, match="x is of kind 'image'"):
        short.fields({"x": Field((1, 4, 4))})


class Follower(nn.Module):
    """A language model that guesses the letter after the one it sees: b after a."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(257, 257, padding_idx=0)
        with torch.no_grad():
            self.words.weight.copy_(torch.eye(257).roll(1, 1) * 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


def test_what_a_language_model_guesses_by_itself_is_a_baseline() -> None:
    lines = ["abcdefgh", "aaaaaaaa", "hgfedcba", "abcabcab", "bbbbbbba", "azazazaz"]
    found = texts(lines, tokenizer="bytes")
    task = gl.Task.supervised(Follower(), F.cross_entropy, like=(found.x,), target="next-token")
    audit = gl.Audit(task, found, ["token-rows"], targets=3, unrelated=0, engine=gl.Engine(device="cpu"))
    result = audit.run()
    truth = result.store.arrays(result.summaries[0].cells[0])["truth/x"][:, 0]
    followed = ((truth[:, 1:] == truth[:, :-1] + 1).sum(1) / 8).tolist()
    for rows_ in (result.rows, result.rescore().rows):
        guessed = [row["baselines"]["next-token guess"]["order"] for row in rows_ if not row["control"]]
        assert guessed == [[share] for share in followed]
    assert max(followed) > 0
    assert "as the model guesses it from the private tokens before it" in render(result)


def test_classifiers_of_texts_guess_none() -> None:
    found = texts({"input_ids": torch.arange(1, 61).reshape(5, 12), "label": [0, 1, 0, 1, 0]}, padding=0)
    audit = gl.Audit(task_of(), found, ["token-rows"], targets=2, unrelated=0, engine=gl.Engine(device="cpu"))
    assert all(
        row["baselines"].keys() == {"most frequent", "nearest other", "nearest of class"} for row in audit.run().rows
    )


# --- from the command line --------------------------------------------------------------------------------------------

TASK = """
import torch
from torch import nn

import gradleak as gl


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(257, 16, padding_idx=0), nn.Linear(16, 2)

    def forward(self, ids):
        return self.out(self.words(ids).mean(1))


torch.manual_seed(0)
like = (torch.ones(1, 16, dtype=torch.long), torch.zeros(1, dtype=torch.long))
task = gl.Task.supervised(Mean(), nn.functional.cross_entropy, like=like)


class Upper:
    pad_token_id = 0

    def encode(self, text):
        return [ord(letter) + 1 for letter in text.upper()]


tokenizer = Upper()
"""
SECRETS = [
    f"{name} owes {owed}" for name, owed in zip(("zebedee", "quentin", "xanthe", "wilfred"), "7319", strict=True)
]


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task, and a file of private texts."""
    lines = [f'"{text}",{number % 2}' for number, text in enumerate(SECRETS)]
    (tmp_path / "letters.csv").write_text("\n".join(["text,label", *lines, *lines]) + "\n")
    (tmp_path / "victim.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    """Everything that a command prints."""
    answer = CliRunner().invoke(app, [*arguments])
    assert answer.exit_code == code, answer.output + repr(answer.exception)
    return answer.output


def silent(text: str) -> bool:
    """Does it hold no private word, and no run of ids of one?"""
    words = [word for secret in SECRETS for word in secret.split() if len(word) > 4]
    ids = [r"\D+".join(str(byte + 1) for byte in word.encode()) for word in words]
    return not any(re.search(each, text.lower()) for each in (*words, *ids))


def test_what_is_private_is_seen_where_it_is_printed() -> None:
    ids = torch.tensor([[byte + 1 for byte in b"zebedee owes 7"]])
    assert not any(map(silent, ("Zebedee", str(ids), str(ids.tolist()), ", ".join(map(str, ids[0].tolist())))))
    assert silent("token-rows names 9 tokens of 1 text")


def test_an_audit_of_texts_prints_none_of_them(private: Path) -> None:
    """The attack finds the bag of every text, and its ids; what is printed and handed on names neither."""
    options = ["--data", "letters.csv", "--tokenizer", "bytes"]
    checked = run("check", "victim.py:task", *options)
    assert silent(checked)
    assert "token-rows" in checked
    assert "up to 2 rows of whole texts" in checked
    audit = ["audit", "victim.py:task", *options, "--attack", "token-rows", "--lr", "0.1", "--targets", "2", "--plain"]
    printed = run(*audit, "-o", "run", "--junit", "junit.xml")
    assert "tokens found" in printed
    assert "Positive control passed" in printed
    assert silent(printed)
    handed_on = ("junit.xml", "run/verdict.json", "run/run.toml", "run/environment.json", "run/rows.jsonl")
    assert all(silent((private / name).read_text()) for name in handed_on)
    result = gl.AuditResult.load("run")
    assert result.summaries[0].means["bag"] > 0.6
    assert silent(run("report", "run", "-o", "again.html"))
    assert silent(result.table() + str(result.verdict) + result._repr_html_())


def test_the_report_shows_texts_in_their_words(private: Path) -> None:
    options = ["--data", "letters.csv", "--tokenizer", "bytes", "--attack", "token-rows", "--lr", "0.1", "--plain"]
    run("audit", "victim.py:task", *options, "--targets", "2", "-o", "run")
    page = (private / "run" / "report.html").read_text()
    shown = [re.sub(r"<[^>]*>", "", each) for each in re.findall(r'<p class="words">(.*?)</p>', page, flags=re.S)]
    assert shown
    assert all(text in SECRETS for text in shown)
    assert '<mark class="elsewhere">' in page
    (private / "run" / "arrays" / "words.safetensors").unlink()
    with pytest.raises(BadRun, match=r"words\.safetensors is missing"):
        _ = gl.AuditResult.load("run").fields


@pytest.mark.parametrize("said", ["ids", "ids.tolist()"])
def test_broken_audits_of_texts_print_none_of_them(private: Path, said: str) -> None:
    """A model that quotes its input when it fails: the traceback stays in the folder of the run."""
    private_one = "if ((ids[:, 0] == 123) & (ids[:, 1] == 102)).any():"
    lines = f'{private_one}\n            raise ValueError(f"odd ids {{{said}}}")\n        return self.out('
    (private / "victim.py").write_text(TASK.replace("return self.out(", lines))
    options = ["--data", "letters.csv", "--tokenizer", "bytes", "--attack", "token-rows", "--lr", "0.1", "--plain"]
    printed = run("audit", "victim.py:task", *options, "--targets", "2", "-o", "run", "--junit", "junit.xml", code=2)
    assert "every cell failed, the first with: ValueError: odd ids" in printed
    assert silent(printed)
    assert silent((private / "junit.xml").read_text())


def test_messages_keep_shapes_and_lose_values() -> None:
    message = "weight of size [64, 3, 7, 7], input[1, 1, 8, 8] 0.5"
    assert without_values(message) == message
    assert without_values("odd [[1, 2, 3], [4, 5, 6]] here") == "odd [...] here"
    assert without_values("tensor([[123, 102,  99, 102, 101, 102,") == "tensor([...]"
    assert without_values("[0.25, -1.5, 3.0, 4.125, 2.0, 7e-3]") == "[...]"


@pytest.fixture
def update(private: Path) -> Path:
    """An update of one text, as a server sees it, and the text for the client's gate."""
    lines = ["", "import gradleak.data", f"mine = gl.data.texts({SECRETS!r}, tokenizer='bytes').fitted(16)"]
    lines += ["batch = {'x': mine.x[:1], 'y': torch.zeros(1, dtype=torch.long)}"]
    lines += ["other = {'x': mine.x[1:2], 'y': torch.zeros(1, dtype=torch.long)}"]
    lines += ["gl.observe(task, batch, gl.LocalTraining(lr=0.1)).save('update.safetensors')"]
    (private / "client.py").write_text(TASK + "\n".join(lines) + "\n")
    load_object("client.py:batch", "")
    return private / "update.safetensors"


def test_an_attack_on_one_update_prints_counts_and_keeps_the_texts_in_its_folder(update: Path) -> None:
    named = TASK.replace("like=like)", "like=like, kind=gl.kinds.Tokens(words=gl.data.texts(['a']).words))")
    (update.parent / "victim.py").write_text(named)
    options = ["-t", "victim.py:task", "-a", "token-rows", "--lr", "0.1", "-o", "out", "--plain"]
    printed = run("attack", str(update), *options)
    assert silent(printed)
    assert "9 tokens named in 1 text, 9 of them different (x)" in printed
    [_, text] = (update.parent / "out" / "reconstruction.txt").read_text().splitlines()
    assert set(text) == set(SECRETS[0])


def test_recorded_updates_of_texts_are_attacked_without_their_truth(update: Path) -> None:
    """A bag of tokens has places without a token, so no client could train on it, and nothing is replayed."""
    (update.parent / "seen").mkdir()
    update.rename(update.parent / "seen" / "one.safetensors")
    options = ["--observations", "seen", "--task", "victim.py:task", "--lr", "0.1", "--attack", "token-rows", "--plain"]
    unpadded = TASK.replace(", padding_idx=0", "")  # else places without a token count as padding
    (update.parent / "victim.py").write_text(unpadded)
    printed = run("audit", *options, "-o", "blind")
    assert silent(printed)
    assert "incomplete: places of the reconstruction have no value" in printed
    assert "9 tokens named in 1 text, 9 of them different (x)" in printed
    assert silent((update.parent / "blind" / "findings.jsonl").read_text())


def test_a_gate_blocks_updates_that_name_their_tokens(update: Path) -> None:
    options = [str(update), "--task", "victim.py:task", "--lr", "0.1"]
    blind = run("gate", *options, code=1)
    assert "BLOCK. token-rows names 9 tokens of its texts." in blind
    assert silent(blind)
    (update.parent / "strict.toml").write_text("tokens = 0.5\n")
    strict = run("gate", *options, "--data", "client.py:batch", "--policy", "strict.toml", code=1)
    assert "1 of 1 texts come back from this update" in strict
    assert "tokens found" in strict
    wrong = run("gate", *options, "--data", "client.py:other", code=1)
    assert "The texts given do not make this update" in wrong
    (update.parent / "bits.toml").write_text("most_bits = 4.0\n")
    assert "8.0 bits per token, 4 are the most allowed" in run("gate", *options, "--policy", "bits.toml", code=1)


def test_a_gate_lets_pass_what_attacks_on_texts_do_not_find(update: Path) -> None:
    """Seven tenths of the tokens are found, in no order: below what the policy allows."""
    options = [str(update), "--task", "victim.py:task", "--lr", "0.1", "--data", "client.py:batch"]
    allowed = run("gate", *options)
    assert allowed.startswith("ALLOW.")
    assert "gave no text away; that is no proof of safety" in allowed
    frozen = TASK.replace("padding_idx=0)", "padding_idx=0).requires_grad_(False)")
    (update.parent / "victim.py").write_text(frozen)
    assert "BLOCK" in run("gate", *options, code=1)
