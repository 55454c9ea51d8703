"""Reports of what is no image, or more than one: rows, series, texts, masks, values. Each is drawn by its kind."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradleak as gl
from gradleak.audit.result import AuditResult
from gradleak.report import gallery, render
from gradleak.report.exhibits import CHANNELS, COLUMNS, OPEN, TOKENS, Cells, Curves, Text, drawn, further
from gradleak.report.page import Page
from gradleak.report.rounds import rounds
from gradleak.report.terminal import fitted
from gradleak.report.threshold import crossed
from gradleak.report.words import Words
from gradleak.scenario.fields import UNBOUNDED, Field
from gradleak.scenario.kinds import (
    KINDS,
    Cell,
    ClassMap,
    Column,
    Exhibit,
    Image,
    Measure,
    MultiLabel,
    Series,
    Table,
    Tokens,
    Value,
    Vector,
)
from test_report import ADDRESSES, HOSTILE, Reader

PEOPLE = 20


def network(entries: int, outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(entries, 16), nn.Sigmoid(), nn.Linear(16, outputs))


def audited(task: gl.Task, data: Any, attack: str, **changes: Any) -> AuditResult:
    clients = gl.Federation(clients=4, examples=1, training=gl.LocalTraining(lr=0.1))
    standard = {"federation": clients, "targets": 2, "engine": gl.Engine(device="cpu")}
    result = gl.Audit(task, data, attacks=[attack], **{**standard, **changes}).run()
    assert not result.failed, result.failed[0]["traceback"]
    return result


def table() -> AuditResult:
    rows = gl.data.load("breast-cancer")
    task = gl.Task.supervised(network(30), cross_entropy, like=(rows.x[:1], rows.y[:1]), kind=Table(rows.columns))
    return audited(task, rows, "idlg:steps=30", defences=[None, "pruning"])


def hostile() -> AuditResult:
    """A table whose names and categories are HTML, and a search too short to get all of it right."""
    kind = Table((Column(HOSTILE), Column("job", (f"{HOSTILE}0", f"{HOSTILE}1")), Column("pay & <b>more</b>")))
    source = torch.Generator().manual_seed(1)
    numbers, jobs = torch.randn(PEOPLE, 2, generator=source), torch.eye(2)[torch.arange(PEOPLE) % 2]
    x = torch.cat([numbers[:, :1], jobs, numbers[:, 1:]], 1)
    y = torch.arange(PEOPLE) % 2
    task = gl.Task.supervised(network(4), cross_entropy, like=(x[:1], y[:1]), kind=kind)
    return audited(task, (x, y), "idlg:steps=1")


def series() -> AuditResult:
    source = torch.Generator().manual_seed(0)
    pitch, phase = torch.rand(2, PEOPLE, 2, 1, generator=source)
    x, y = torch.sin(torch.linspace(0, 1, 12) * (2 + 6 * pitch) + phase), torch.arange(PEOPLE) % 2
    task = gl.Task.supervised(network(24), cross_entropy, like=(x[:1], y[:1]), kind="series")
    return audited(task, (x, y), "idlg:steps=30")


class Bag(nn.Module):
    """The mean of the tokens' embeddings, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(40, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embedding(ids).mean(1))


def text() -> AuditResult:
    torch.manual_seed(0)
    x, y = torch.randint(0, 40, (PEOPLE, 6)), torch.arange(PEOPLE) % 2
    return audited(gl.Task.supervised(Bag(), cross_entropy, like=(x[:1], y[:1])), (x, y), "token-rows")


def mask() -> AuditResult:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Conv2d(4, 2, 3, padding=1))
    x = torch.rand(PEOPLE, 1, 8, 8)
    y = (x[:, 0] > 0.5).long()
    task = gl.Task.supervised(model, cross_entropy, like=(x[:1], y[:1]), bounds=(0.0, 1.0))
    return audited(task, (x, y), "dlg:steps=5")


def regression() -> AuditResult:
    rows = gl.data.load("diabetes")
    model = nn.Sequential(network(rows.x.shape[1], 1), nn.Flatten(0))
    task = gl.Task.supervised(model, nn.MSELoss(), like=(rows.x[:1], rows.y[:1]), kind=Table(rows.columns))
    return audited(task, rows, "dlg:steps=40")


MADE = {made.__name__: made for made in (table, hostile, series, text, mask, regression)}
OTHER = [name for name in MADE if name != "mask"]


@cache
def result_of(name: str) -> AuditResult:
    return MADE[name]()


@cache
def page_of(name: str) -> str:
    return render(result_of(name))


def body(page: str) -> str:
    return page.split("</style>")[1].split("<script>")[0]


def cards(page: str) -> list[str]:
    """The cards of the gallery, without those of the control."""
    own = page.split('<h2 id="gallery"')[1].split("</section>")[0]
    return re.findall(r'<li class="card".*?</figure></li>', own, flags=re.S)


def plain(html: str) -> str:
    """What a reader sees."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


# --- whole pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_the_page_is_whole_offline_and_runs_one_script(name: str) -> None:
    page = page_of(name)
    read = Reader(page)
    assert read.open == []
    assert len(read.named("script")) == 1
    assert not read.named("img")
    assert all("onerror" not in attributes for _, attributes in read.tags)
    for _, attributes in read.tags:
        for address in filter(None, map(attributes.get, ADDRESSES)):
            assert address.startswith(("#", "data:image/")), address
    names = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(names) == len(set(names))
    assert len(cards(page)) == 2 * len(result_of(name).verdicts)
    assert len(page) < 200_000


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_image_is_not_called_one(name: str) -> None:
    page = re.sub(r'<section aria-labelledby="references".*?</section>', "", body(page_of(name)), flags=re.S)
    assert not re.findall(r".{30}(?:image|psnr|ssim|picture|pixel).{30}", page, flags=re.I | re.S)
    one, many = result_of(name).kind.noun
    assert f'<a href="#gallery">Recovered {many}</a>' in page
    assert f"<dt>clearest {one}</dt>" in page
    assert f"Each private {one} appears once per defence" in page
    assert result_of(name).positive_control.level in page


def test_tables_speak_of_the_measures_of_the_kind() -> None:
    page, result = page_of("table"), result_of("table")
    read = plain(page.split('<h2 id="results"')[1].split("</section>")[0])
    assert "columns right 95th categorical right numeric right RMSE (SD) rank 1" in read
    assert "Recovered: every column is right" in read
    assert "of RMSE (SD), lower ones do" in read
    assert "columns right categorical right numeric right RMSE (SD) what it is" in plain(
        page.split('<h2 id="baselines"')[1].split("</section>")[0]
    )
    assert "the most frequent category and the median number of every column, over other real rows" in page
    assert "Recovered share and mean share of columns right of each" in page
    assert "columns right" in page.split('class="matrix"')[1].split("</table>")[0]
    assert "a row counts as recovered when every column is right" in page
    narrow = fitted(result, 70)
    assert "more columns in a wider terminal" in narrow
    assert "columns right mean/median/clearest" in narrow
    assert "RMSE" not in narrow
    assert "RMSE" in fitted(result, None)


def test_a_threshold_names_what_was_recovered() -> None:
    assert "of the series, which is above the stated 10%" in crossed(result_of("series"), 0.1)


def test_rounds_are_drawn_by_the_headline_of_the_kind() -> None:
    line = result_of("table").summaries[0]
    found = rounds([replace(line, round=0), replace(line, round=3)], [], None)
    assert found is not None
    assert [chart.title for chart in found.leakage] == ["Rows recovered, %", "columns right, %"]
    assert [tick.text for tick in found.leakage[1].y][-1] == "100"


# --- one card of each ------------------------------------------------------------------------------------------------


def test_a_row_stands_beside_what_was_recovered_of_it() -> None:
    result, [first, *_] = result_of("table"), cards(page_of("table"))
    target = int(re.findall(r'id="target-\w+-(\d+)-0"', first)[0])
    kind, truth = result.fields["x"].kind, result.store.arrays(result.summaries[0].cells[0])["truth/x"][target, 0]
    assert isinstance(kind, Table)
    assert first.count('<th scope="row">') == len(kind.columns) == 30
    for column, value in zip(kind.columns, truth.tolist(), strict=True):
        text = f"{column.raw(value):.6g}"
        assert f'<tr class="right"><th scope="row">{column.name}</th><td>{text}</td>' in first, column.name
    assert first.count("<small>right</small>") == 30
    assert 'tabindex="0" role="group" aria-label="private row beside what idlg recovered' in first
    assert "100 % columns right" in first.replace("\N{NO-BREAK SPACE}", " ")
    assert "categorical right" not in first, "it has no categories"
    label = int(result.store.arrays(result.summaries[0].cells[0])["truth/y"][target, 0])
    assert f"label: true {label}, recovered {label} (right)" in first


def test_names_and_categories_of_a_table_are_escaped_and_wrong_ones_are_called_wrong() -> None:
    page = page_of("hostile")
    shown = cards(page)
    assert "&lt;script&gt;alert(" in shown[0]
    assert "pay &amp; &lt;b&gt;more&lt;/b&gt;" in shown[0]
    assert "<script>alert" not in page
    assert "<b>more" not in page
    words = re.findall(r'<tr class="(right|wrong)">.*?<small>(\w+)</small>', "".join(shown), flags=re.S)
    assert all(mark == word for mark, word in words)
    assert {mark for mark, _ in words} == {"right", "wrong"}


def test_a_series_is_overlaid_channel_by_channel() -> None:
    [first, *_] = cards(page_of("series"))
    drawings = re.findall(r'<svg class="overlay".*?</svg>', first, flags=re.S)
    assert len(drawings) == 2
    assert "channel 2: correlation 1.00" in drawings[1]
    for drawing in drawings:
        true, found = (
            [float(number) for number in re.findall(r"[\d.]+", path)] for path in re.findall(r' d="([^"]*)"', drawing)
        )
        assert len(true) == 24
        assert true == pytest.approx(found, abs=0.3)
    assert "solid: true, dashed: recovered, in standard deviations" in first


def test_the_recovered_tokens_of_a_text_are_marked() -> None:
    result, shown = result_of("text"), cards(page_of("text"))
    marks = 0
    for card in shown:
        target = int(re.findall(r'id="target-\w+-(\d+)-0"', card)[0])
        arrays = result.store.arrays(result.summaries[0].cells[0])
        private, found = arrays["truth/x"][target, 0].tolist(), arrays["found/x"][target, 0].tolist()
        running = re.findall(r'<p class="words">(.*?)</p>', card, flags=re.S)[0]
        assert plain(running).split() == [str(token) for token in private]
        placed = [int(token) for token in re.findall(r"<mark>(\d+)</mark>", running)]
        elsewhere = [int(token) for token in re.findall(r'<mark class="elsewhere">(\d+)</mark>', running)]
        assert placed == [a for a, b in zip(private, found, strict=True) if a == b]
        assert set(placed) | set(elsewhere) == set(private) & set(found)
        assert f"{len(placed)} of 6 tokens in place" in card
        marks += len(placed) + len(elsewhere)
    assert marks > 6


def test_a_mask_stands_beside_its_image() -> None:
    [first, *_] = cards(page_of("mask"))
    assert first.count('class="three"') == 2
    assert first.index('aria-label="private image,') < first.index('aria-label="private mask,')
    assert re.search(r"mask: \d+\N{NO-BREAK SPACE}% places right", first)
    uris = re.findall(r"--true:url\(([^)]*)\)", first)
    assert uris[0] != uris[1]
    assert '<a href="#gallery">Pictures</a>' in page_of("mask")


def test_a_regression_shows_the_value_below_its_row() -> None:
    [first, *_] = cards(page_of("regression"))
    line = re.search(r"value: true (\S+), recovered (\S+) standard deviations \((\w+)\)", first)
    assert line is not None
    assert float(line[1]) == pytest.approx(float(line[2]), abs=0.01)
    assert line[3] == "right"


def test_what_the_attacker_was_given_is_not_shown_as_recovered() -> None:
    result = result_of("table")
    given = replace(result, settings={**result.settings, "given": ["y"]})
    assert "label: true" in page_of("table")
    assert "label: true" not in render(given)


def test_a_class_of_an_image_is_left_to_its_score() -> None:
    """The cards of image classifiers are as they were before other kinds came."""
    x, y = torch.rand(PEOPLE, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(PEOPLE) % 2
    task = gl.Task.supervised(network(36), cross_entropy, like=(x[:1], y[:1]), bounds=(0.0, 1.0))
    result = audited(task, (x, y), "idlg:steps=5")
    assert "found/y" in result.store.arrays(result.rows[0]["cell"])
    assert "label: true" not in render(result)


# --- views -----------------------------------------------------------------------------------------------------------


def test_long_rows_texts_and_series_say_how_much_is_left_out() -> None:
    cells = tuple(Cell(str(place), "a", "b", False) for place in range(1000))
    row, words = drawn(Exhibit(cells=cells)), drawn(Exhibit(cells=cells, running=True))
    assert isinstance(row, Cells)
    assert (len(row.cells), row.left_out) == (COLUMNS, 1000 - COLUMNS)
    assert isinstance(words, Text)
    assert (len(words.cells), words.left_out) == (TOKENS, 1000 - TOKENS)
    curves = drawn(Exhibit(curves=(torch.rand(9, 5000), torch.rand(9, 5000))))
    assert isinstance(curves, Curves)
    assert (len(curves.paths), curves.left_out) == (CHANNELS, 9 - CHANNELS)
    assert curves.size < 40_000
    long = Field((100,), UNBOUNDED)
    vector = drawn(Vector().exhibit(torch.zeros(100), torch.zeros(100), long))
    assert isinstance(vector, Cells)
    assert len(vector.cells) + vector.left_out == 100


def test_what_is_far_off_stays_in_the_box_and_a_flat_curve_is_drawn() -> None:
    true, found = torch.zeros(1, 8), torch.full((1, 8), 1e6)
    view = drawn(Exhibit(curves=(true, found)))
    assert isinstance(view, Curves)
    heights = [float(point.split()[1]) for path in view.paths[0] for point in path[1:].split("L")]
    assert all(0 <= height <= view.height for height in heights)
    assert heights[0] != heights[-1]
    assert drawn(Exhibit()) is None
    assert drawn(Exhibit(curves=(torch.zeros(1, 1), torch.ones(1, 1)))) is not None


def test_a_text_in_words_names_what_is_missing() -> None:
    kind, field = Tokens(padding=0, words=("-", "the", "<i>cat</i>", "sat")), Field((4,), classes=4, kind=Tokens())
    view = drawn(kind.exhibit(torch.tensor([1, 2, 3, -1]), torch.tensor([3, 1, -1, -1]), field))
    assert isinstance(view, Text)
    assert view.summary == "0 of 3 tokens in place, 2 found elsewhere; missing: <i>cat</i>"
    assert view.joined == " "
    spaced = drawn(
        replace(kind, words=("-", " the", " cat", " sat")).exhibit(torch.tensor([1]), torch.tensor([1]), field)
    )
    assert isinstance(spaced, Text)
    assert spaced.joined == "", "words that bring their spaces"
    placed = drawn(kind.exhibit(torch.tensor([1, 2, 3, -1]), torch.tensor([1, 3, 3, -1]), field))
    assert isinstance(placed, Text)
    assert placed.summary == "2 of 3 tokens in place; missing: <i>cat</i>", "the 3 counts once"


def test_a_long_text_folds() -> None:
    kind, ids = Tokens(), torch.arange(600)
    view = drawn(kind.exhibit(ids, ids, Field((600,), classes=600, kind=kind)))
    assert isinstance(view, Text)
    assert (len(view.first), len(view.more), view.left_out, view.joined) == (OPEN, TOKENS - OPEN, 600 - TOKENS, " ")


@pytest.mark.parametrize(
    ("field", "true", "found", "text"),
    [
        (Field((3,), kind=MultiLabel()), [1.0, 0.0, 1.0], [1.0, 1.0, 1.0], "true 1 0 1, recovered 1 1 1 (wrong)"),
        (Field((), UNBOUNDED, kind=Value()), 0.5, 0.5, "true 0.5, recovered 0.5 standard deviations (right)"),
        (Field((), classes=9), 3, 4, "true 3, recovered 4 (wrong)"),
        (Field((20,), UNBOUNDED), [1.0] * 20, [1.0] * 19 + [9.0], "95\N{NO-BREAK SPACE}% entries right"),
        (Field((20,), classes=3), [1] * 20, [1] * 10 + [2] * 10, "50\N{NO-BREAK SPACE}% places right"),
    ],
)
def test_a_further_field_is_a_line_of_text(field: Field, true: Any, found: Any, text: str) -> None:
    line = further("y", torch.tensor(true), torch.tensor(found), field)
    assert (line.name, line.text, line.view) == (field.kind.noun[0], text, None)


def test_further_fields_that_can_be_drawn_are() -> None:
    wave, map_ = torch.rand(1, 30), torch.ones(4, 4).long()
    assert isinstance(further("sound", wave, wave, Field((1, 30), UNBOUNDED, kind=Series())).view, Curves)
    assert further("sound", wave, wave, Field((1, 30), UNBOUNDED, kind=Series())).name == "sound"
    assert further("y", map_, map_, Field((4, 4), classes=2, kind=ClassMap())).view is not None


def test_the_nearest_reconstruction_is_shown_whatever_the_direction_of_the_measure() -> None:
    grid: list[dict[str, Any]] = [
        {"defence": "none", "round": 0, "seed": 0, "observation": "it", "attack": name, "scores": {"rmse": [value]}}
        for name, value in (("far", 3.0), ("near", 1.0), ("broken", None))
    ]
    best = gallery._strongest(grid, Measure("rmse", "RMSE", higher=False))
    [(level, row, _)] = best["none"].values()
    assert (level, row["attack"]) == (-1.0, "near")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_words(name: str) -> None:
    words = Words(KINDS[name]())
    assert words.rule
    assert words.recovered.startswith(("a ", "an "))
    assert not words.entries.endswith("ys")
    assert all(measure.label in words.means for measure in words.measures)
    assert ("lower" in words.direction) == any(not measure.higher for measure in words.measures)


def test_image_words_are_as_before() -> None:
    words = Words(Image())
    assert words.rule == "SSIM above 0.5, PSNR above 18 dB"
    assert (words.mean, words.titled, words.means) == ("mean PSNR", "PSNR, dB", "PSNR and SSIM")
    assert (words.gallery, words.shown, words.entries) == ("Pictures", "pictures", "pixels")
    assert words.direction == "Higher numbers mean more leakage."


def test_a_run_without_a_finished_line_still_has_a_page() -> None:
    result = result_of("table")
    empty = replace(result, rows=[])
    assert Reader(render(empty)).open == []
    assert Page(empty).words.many == "rows"
    assert fitted(empty, 20)
