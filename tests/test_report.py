"""The report: one offline file, hostile text stays text, every private image once and the worst first."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.defences import DPFedAvg, LocalGaussian, Pruning
from gradleak.guarantee import Exposure, Guarantee
from gradleak.report import pictures, render
from gradleak.report.page import MOST, Page
from gradleak.results import Control, Rate, Summary, Verdict
from gradleak.results.certificate import Certified
from gradleak.results.labels import Trained
from gradleak.results.rows import BadRun

HOSTILE = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"
NOTHING: dict[str, Any] = {  # an attack that did not work: inconclusive, never safe
    **dict.fromkeys(("recovered", "excess", "identified"), Rate(0.0, 0.0, 0.6, 4)),
    "converged": 0.1,
}


def row(cell: str, target: int | None, psnr: float, **changes: Any) -> dict[str, Any]:
    standard: dict[str, Any] = {
        "version": 1, "cell": cell, "status": "done", "control": False, "attack": "ig:steps=10", "defence": "none",
        "form": "undefended", "round": 0, "seed": 0, "examples": 1, "targets": 4, "target": target,
        "observation": f"client-{target}", "knows": "C (training details)",
        "scores": {"psnr": [psnr], "ssim": [psnr / 40], "mse": [10 ** (-psnr / 10)], "rank": [1]},
        "gallery_size": [100], "hits": {"recovered": [psnr > 18]}, "labels": {"multiset_accuracy": 1.0},
        "baselines": {"mid-grey": {"psnr": [11.0], "ssim": [0.1]}, "unrelated update": {"psnr": [9.0], "ssim": [0.05]}},
        "match": 1e-4, "match_start": 1.0, "objective": 1e-4, "restart": 0, "diverged": False, "converged": True,
        "checks": [], "analyses": {}, "seconds": 1.5,
    }  # fmt: skip
    return {**standard, **changes}


def summary(**changes: Any) -> Summary:
    rate = Rate(0.75, 0.4, 1.0, 4)
    standard: dict[str, Any] = {
        "attack": "ig:steps=10", "defence": "none", "form": "undefended", "round": 0, "examples": 1,
        "cells": ("a" * 16,), "targets": 4, "seeds": 1, "recovered": rate, "excess": rate, "identified": rate,
        "rates": {"rank1": rate}, "chance": 0.01, "means": {"psnr": 24.0, "ssim": 0.8, "labels": 1.0}, "medians": {},
        "worst": {"psnr": 33.0, "ssim": 0.97}, "baseline": {}, "match": 1e-4, "converged": 1.0, "diverged": 0.0,
        "seconds": 6.0,
    }  # fmt: skip
    return Summary(**{**standard, **changes})


def sample(images: dict[str, dict[str, Tensor]] | None = None, **changes: Any) -> Any:
    """What `render` reads of an AuditResult, made by hand."""
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(4, 1, 3, 8, 8, generator=generator)
    pair = {"true": true, "found": (true + 0.1 * torch.rand(true.shape, generator=generator)).clamp(0, 1)}
    pictures_of = images or {"a" * 16: pair, "b" * 16: pair}
    rows = [row("a" * 16, target, 15.0 + 5 * target) for target in range(4)]
    rows += [row("b" * 16, target, 8.0 + target, defence="fedsam", form="adaptive") for target in range(4)]
    verdict = Verdict("leaks", "ig recovered 75 % of the images.", "The strongest attack counts.")
    standard: dict[str, Any] = {
        "rows": rows,
        "settings": {"targets": 4, "federation": {"clients": 1, "lr": 1.0}, "attacks": ["ig:steps=10"]},
        "environment": {"commit": "abc", "torch": "2.13.0"},
        "folder": Path("runs/sample"),
        "summaries": [summary(), summary(defence="fedsam", form="adaptive", cells=("b" * 16,), **NOTHING)],
        "verdict": verdict,
        "verdicts": {"none": verdict, "fedsam": Verdict("inconclusive", "The attack did not converge.", "")},
        "positive_control": Control(True, 30.0, "ig reached 30.0 dB on one undefended example.", "a" * 16),
        "complete": True,
        "images": lambda cell: pictures_of[cell],
    }
    return SimpleNamespace(**{**standard, **changes})


class Reader(HTMLParser):
    """Tags with their attributes, and whether the page is well nested."""

    VOID = {"meta", "img", "br", "link", "input", "hr"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_is_whole_and_offline() -> None:
    text = render(sample())
    page = Reader(text)
    assert text.startswith("<!doctype html>")
    assert page.open == []
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:image/png;base64,")), address
    assert "script" not in {tag for tag, _ in page.tags}
    assert "@import" not in text
    assert not re.search(r"url\(", text)
    assert "default-src 'none'" in text


def test_every_section_of_the_report_card_is_there() -> None:
    text = render(sample())
    headings = set(re.findall(r'<h2 id="(\w+)"', text))
    assert headings == {"results", "defences", "gallery", "control", "baselines", "untested", "repeat", "references"}
    assert set(re.findall(r'href="#(\w+)"', text)) == headings
    for word in ("Threat model", "honest-but-curious", "level C", "ig recovered 75 %", "The strongest attack counts.",
                 "[40, 100]", "mid-grey", "unrelated update", "Geiping", "federation.lr", "--config"):  # fmt: skip
        assert word in text, word


def test_it_says_what_a_reader_could_get_wrong() -> None:
    page = render(sample())
    assert "exact binomial ones" in page
    assert "clearest 33.0" in page
    assert "worst 33.0" not in page
    assert "From the folder where it was started" in page
    assert Page.of(sample()).command == "gradleak audit --config runs/sample/run.toml --out runs/sample-again"
    inside = sample(folder=Path.cwd() / "runs" / "my run")
    assert Page.of(inside).command == "gradleak audit --config 'runs/my run/run.toml' --out 'runs/my run-again'"
    assert "QUICK RUN" in Page.of(sample(settings={"trial": True})).subtitle


def certificate(**changes: Any) -> dict[str, Any]:
    standard = {
        "verdict": "determined", "reason": "The update fixes all 192 values.", "unknowns": 192, "equations": 900,
        "rank": 192, "null": 0, "tolerance": 1e-10, "residual": 3e-13, "rounding": 1e-9, "share": 1.0, "shift": 1e-9,
        "largest": 2.0, "smallest": 0.01, "floor": None,
    }  # fmt: skip
    return {**standard, **changes}


def test_proofs_are_told_in_plain_words() -> None:
    assert 'id="proofs"' not in render(sample()), "no certificates, no section"
    rows = [row("a" * 16, target, 30.0, certificate=certificate(floor=1e-4)) for target in range(3)]
    rows += [row("a" * 16, 3, 30.0, certificate=None)]
    open_ = certificate(verdict="not determined", rank=0, null=192, reason=HOSTILE)
    rows += [row("b" * 16, 0, 9.0, defence="fedsam", form="adaptive", certificate=open_)]
    lines = [summary(certified=Certified.of(rows[:4]))]
    lines += [summary(defence="fedsam", form="adaptive", cells=("b" * 16,), certified=Certified.of(rows[4:]))]
    text = render(sample(rows=rows, summaries=lines))
    assert Reader(text).open == []
    told = text.split('id="proofs"')[1].split("</section>")[0]
    assert "3 of 3 determined: the update fixes every pixel; residual 3e-13; smallest singular value 1e-02" in told
    assert '<span class="tag bad">proved</span> <b>ig:steps=10, B = 1, round 0</b>' in told
    assert '<span class="tag void">open</span> <b>ig:steps=10 (adaptive) against fedsam' in told
    assert told.count("The update fixes all 192 values.") == 3
    assert "a tolerance of 1e-10 of the largest singular value" in told
    assert "below a mean squared error of 1.0e-04" in told
    assert "<script>" not in told


def of_defences(*lines: Summary) -> str:
    page = render(sample(summaries=[summary(), *lines]))
    assert Reader(page).open == []
    return page.split('id="defences"')[1].split("</section>")[0]


def test_a_defence_is_told_by_all_attackers_its_reference_chance_and_what_it_proves() -> None:
    levels = {"naive": 0.0, "masked": 0.25, "adaptive": 0.5}
    lines = [
        summary(defence="pruning", form=form, recovered=Rate(share, 0.0, 1.0, 4), means={"psnr": 9.0 + 20 * share},
                baseline={"recovered": 0.0, "psnr": 7.5}, guarantee=Guarantee(reason="large entries are released"))
        for form, share in levels.items()
    ]  # fmt: skip
    told = of_defences(*lines)
    assert re.findall(r'class="number">(?:<span[^>]*>)?([\d.]+ %)', told) == ["75 %", "0 %", "25 %", "50 %", "0 %"]
    assert told.count('<span class="tag void">50 %</span>') == 1, "the headline is marked"
    assert "19.0 dB, ig<" in told
    assert "7.5 dB" in told
    assert "no formal guarantee (large entries are released)." in told
    assert "epsilon " not in told.replace("prints an epsilon", "")
    assert "not recorded" in of_defences(summary(defence="old", form="naive"))
    assert 'id="defences"' not in render(sample(summaries=[summary()], rows=[])), "no defence, no section"


@pytest.mark.parametrize(
    ("defence", "tone", "word"),
    [
        (DPFedAvg(noise_multiplier=2.0), "warn", "not against the server"),
        (LocalGaussian(noise_multiplier=2.0), "good", "epsilon 4.38 at delta 1e-05<"),
        (LocalGaussian(noise_multiplier=0.1), "warn", "epsilon "),  # vacuous
        (DPFedAvg(model="distributed", threshold=2), "warn", "epsilon "),  # only behind secure aggregation
        (Pruning(), "void", "no formal guarantee"),
    ],
)
def test_only_an_epsilon_against_the_server_looks_good(defence: Any, tone: str, word: str) -> None:
    proved = defence.guarantee(Exposure(rounds=2 if tone != "good" else 1, clients=4))
    told = of_defences(summary(defence="it", form="naive", guarantee=proved))
    tags = re.findall(r'<h3>it <span class="tag (\w+)">([^<]*<)', told)
    assert [found for found, _ in tags] == [tone]
    assert word in tags[0][1]
    if proved.epsilon is not None:
        for entry in ("protects", "holds against", "neighbours", "accountant", "sampling", "provided that"):
            assert f"<dt>{entry}</dt>" in told, entry
    assert ("<dt>does not hold against</dt><dd>the aggregating server" in told) == (proved.model == "central")


def test_utility_stands_beside_privacy_where_a_training_measured_it() -> None:
    assert 'id="utility"' not in render(sample())
    lines = [summary(round=20, trained=Trained(20, "none", 0.21, 0.931)), summary(trained=Trained(20, HOSTILE))]
    told = render(sample(summaries=lines)).split('id="utility"')[1].split("</section>")[0]
    assert "93.1%" in told
    assert "0.2100" in told
    assert "<script>" not in told
    assert told.index('"row" class="number">0<') < told.index('"row" class="number">20<')


def test_a_missing_reference_is_called_untested() -> None:
    rows = [row("b" * 16, target, 8.0, defence="fedsam", form="naive") for target in range(4)]
    untested = Page.of(sample(rows=rows)).untested
    assert any("without a defence" in line for line in untested)
    assert any("who know the defence" in line for line in untested)
    assert not any("without a defence" in line for line in Page.of(sample()).untested)


def test_hostile_text_stays_text() -> None:
    bad = sample(
        settings={HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
        environment={HOSTILE: HOSTILE},
        folder=Path("runs") / HOSTILE.replace("/", "|"),
        verdict=Verdict("leaks", HOSTILE, HOSTILE),
        positive_control=Control(False, 3.0, HOSTILE, "a" * 16),
        summaries=[
            summary(attack=HOSTILE, defence=HOSTILE, form=HOSTILE, errors=(HOSTILE,)),
            summary(attack=HOSTILE, defence=HOSTILE, form="naive", guarantee=Guarantee(reason=HOSTILE)),
        ],
        rows=[
            row("a" * 16, 0, 20.0, attack=HOSTILE, defence=HOSTILE, observation=HOSTILE, knows=HOSTILE,
                checks=[{"name": HOSTILE, "severity": HOSTILE, "text": HOSTILE, "fix": HOSTILE}],
                baselines={HOSTILE: {"psnr": [1.0], "ssim": [0.1]}}),
            row("b" * 16, 1, 20.0, status="failed", error=HOSTILE, attack=HOSTILE, scores=None),
        ],
    )  # fmt: skip
    page = Reader(render(bad))
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert all((attributes["src"] or "").startswith("data:") for attributes in page.named("img"))


def test_each_private_image_is_shown_once_and_the_best_recovered_first() -> None:
    weak = [row("b" * 16, target, 5.0, attack="dlg") for target in range(4)]  # the same images, recovered less well
    result = sample(rows=[row("a" * 16, target, 15.0 + 5 * target) for target in range(4)] + weak)
    gallery = render(result).split('id="gallery"')[1].split('id="control"')[0]
    assert [float(value) for value in re.findall(r"<br>PSNR ([\d.]+) dB", gallery)] == [30.0, 25.0, 20.0, 15.0]
    assert gallery.count("<img ") == 3 * 4
    assert "dlg" not in gallery


def test_every_picture_has_a_text() -> None:
    for attributes in Reader(render(sample())).named("img"):
        assert attributes["alt"]
        assert attributes["width"] == "8"


def test_a_failed_control_and_inconclusive_lines_never_look_safe() -> None:
    text = render(
        sample(positive_control=Control(False, 4.0, "4 dB only.", "a" * 16), verdict=Verdict("void", "-", "-"))
    )
    assert "this run shows nothing" in text
    assert 'class="verdict void"' in text
    assert text.count('<tr class="hatched">') == 2, "the inconclusive line, and its defence"


def test_failed_cells_and_checks_are_listed_gravest_first() -> None:
    note = {"name": "sparse update", "severity": "note", "text": "half", "fix": "name it"}
    rows = [row("a" * 16, 0, 20.0, checks=[note]), row("a" * 16, 1, 20.0, checks=[note])]
    rows.append(row("b" * 16, None, 0.0, status="failed", error="ValueError: no", scores=None))
    text = render(sample(rows=rows)).split('id="checks"')[1]
    assert text.index("ValueError: no") < text.index("sparse update")
    assert '<td class="number">2</td>' in text


def test_deleted_arrays_leave_a_report_without_pictures() -> None:
    def gone(cell: str) -> dict[str, Tensor]:
        raise BadRun(cell)

    result = sample()
    result.images = gone
    page = Reader(render(result))
    assert page.open == []
    assert not page.named("img")


def test_many_large_images_stay_a_modest_file() -> None:
    true = torch.rand(60, 1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    rows = [row("a" * 16, target, 10.0 + target / 10) for target in range(60)]
    text = render(sample(images={"a" * 16: {"true": true, "found": true}}, rows=rows))
    assert len(Reader(text).named("img")) == 3 * MOST + 9
    assert f"{60 - MOST} images that were recovered less well" in text
    assert len(text) < 8e6


def test_scores_that_are_missing_or_infinite_are_dashes() -> None:
    nothing = Rate(float("nan"), float("nan"), float("nan"), 0)
    rates = dict.fromkeys(("recovered", "excess", "identified"), nothing)
    line = summary(**rates, rates={}, means={}, worst={}, targets=0, errors=("ValueError",))
    text = render(sample(summaries=[line], rows=[]))
    assert "nan" not in text.split("<h2")[1]
    assert "failed" in text


@pytest.mark.browser
def test_a_browser_shows_the_page_without_asking_the_network(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    place = tmp_path / "report.html"
    place.write_text(render(sample()))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1200), ("dark", 390)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            asked: list[str] = []
            told: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, told=told: told.append(message.text))
            page.goto(place.as_uri())
            assert [url for url in asked if not url.startswith("data:")] == [place.as_uri()]
            assert not told, "the browser complains"
            assert page.title() == "Gradient-leakage audit: sample: leaks"
            assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
                "the page scrolls sideways"
            )
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
            assert dark == (scheme == "dark")
        browser.close()


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_survive_what_diverged(channels: int) -> None:
    image = torch.full((channels, 5, 7), torch.nan)
    image[:, 0] = torch.inf
    drawn = pictures.picture(image)
    assert drawn.size == (7, 5)
    assert drawn.getextrema() == ((0, 255) if channels == 1 else ((0, 255),) * 3)
    assert pictures.difference(image, torch.zeros_like(image)).max() == 1


def test_only_images_are_drawn() -> None:
    with pytest.raises(ValueError, match="shape"):
        pictures.picture(torch.zeros(4, 4))
    assert not pictures.drawable((2, 8, 8))
    assert pictures.sheet([("a", [torch.zeros(1, 8, 8)]), ("b", [torch.ones(1, 8, 8)] * 2)]).size[0] > 2 * 96
