"""The report: one offline file, hostile text stays text, every private image once and the worst first."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from gradleak import report
from gradleak.audit.result import Control, Rate, Summary, Verdict
from gradleak.audit.rows import Trained
from gradleak.audit.summary import Certified
from gradleak.core import pictures
from gradleak.core.files import BadRun
from gradleak.defences import DPFedAvg, LocalGaussian, Pruning
from gradleak.identify.span_certificate import LayerCertificate, SpanCertificate
from gradleak.report import gallery, render, repeat
from gradleak.report.limits import untested
from gradleak.report.matrix import matrix
from gradleak.report.page import SECTIONS, Page, Section
from gradleak.report.rounds import rounds, scatter
from gradleak.report.spans import span_tables
from gradleak.scenario.fields import Field
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.kinds import KINDS

HOSTILE = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"
NOTHING: dict[str, Any] = {  # an attack that did not work: inconclusive, never safe
    **dict.fromkeys(("recovered", "excess", "identified"), Rate(0.0, 0.0, 0.6, 4)),
    "converged": 0.1,
}


def row(cell: str, target: int | None, psnr: float, **changes: Any) -> dict[str, Any]:
    standard: dict[str, Any] = {
        "version": 2, "cell": cell, "status": "done", "control": False, "attack": "ig:steps=10", "defence": "none",
        "form": "undefended", "kind": "image", "round": 0, "seed": 0, "examples": 1, "targets": 4, "target": target,
        "observation": f"client-{target}", "knows": "C (training details)",
        "scores": {"psnr": [psnr], "ssim": [psnr / 40], "mse": [10 ** (-psnr / 10)], "rank": [1]},
        "gallery_size": [100], "hits": {"recovered": [psnr > 18]}, "labels": {"multiset_accuracy": 1.0},
        "baselines": {"mid-grey": {"psnr": [11.0], "ssim": [0.1]}, "unrelated update": {"psnr": [9.0], "ssim": [0.05]}},
        "match": 1e-4, "match_start": 1.0, "objective": 1e-4, "restart": 0, "diverged": False, "converged": True,
        "assignment": [0], "checks": [], "analyses": {}, "seconds": 1.5,
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
        "kind": KINDS["image"](),
        "fields": {"x": Field((3, 8, 8))},
        "pairs": lambda cell, name="x": pictures_of[cell],
        "trace": lambda cell: {
            "step": torch.tensor([0, 5, 9]), "match": torch.tensor([[1.0], [1e-3], [1e-4]]).expand(3, 300)
        },
        "store": SimpleNamespace(arrays=lambda cell: {}),
    }  # fmt: skip
    return SimpleNamespace(**{**standard, **changes})


class Reader(HTMLParser):
    """Tags with their attributes, and whether the page is well nested."""

    VOID = {"meta", "img", "br", "link", "input", "hr", "path", "circle"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def pictures(self) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if "picture" in (attributes.get("class") or "").split()]

    @property
    def cards(self) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if attributes.get("class") == "card"]


def policy_of(text: str) -> str:
    [policy] = [tag["content"] for tag in Reader(text).named("meta") if tag.get("http-equiv")]
    assert policy is not None
    return policy


ADDRESSES = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")


def test_the_page_is_whole_and_offline() -> None:
    text = render(sample())
    page = Reader(text)
    assert text.startswith("<!doctype html>")
    assert page.open == []
    for _, attributes in page.tags:
        for name in ADDRESSES:
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:image/")), address
    assert "@import" not in text
    found = re.findall(r"url\((.{0,22})", text)
    assert found
    assert all(each.startswith(("data:image/png;base64,", "${uri})")) for each in found)
    assert policy_of(text).startswith("default-src 'none'; img-src data:;")


def test_the_one_script_is_ours_and_the_policy_names_its_hash() -> None:
    text = render(sample())
    assert len(Reader(text).named("script")) == 1
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = policy_of(text)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy.replace("style-src 'unsafe-inline'", "")
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "fetch(", "XMLHttp", "http"):
        assert word not in script, word


def test_every_section_of_the_report_card_is_there_in_order() -> None:
    text = render(sample())
    headings = re.findall(r'<h2 id="(\w+)"', text)
    assert headings == ["matrix", "gallery", "defences", "results", "baselines", "control", "assumptions", "untested",
                        "repeat", "references", "evidence"]  # fmt: skip
    nav = text.split("<nav")[1].split("</nav>")[0]
    assert re.findall(r'href="#(\w+)"', nav) == headings
    for word in ("Threat model", "honest-but-curious", "level C", "ig recovered 75 %", "The strongest attack counts.",
                 "[40, 100]", "mid-grey", "unrelated update", "Geiping", "federation.lr", "--config"):  # fmt: skip
        assert word in text, word
    for part in re.findall(r'<section aria-labelledby="(\w+)".*?</section>', text, flags=re.S):
        own = text.split(f'<h2 id="{part}"')[1].split("</section>")[0]
        assert "How to read this." in own or part in ("repeat", "references"), part


def contents(result: Any) -> dict[str, Any]:
    """What each section of the report draws, by its anchor."""
    return {section.anchor: content for section, content in Page(result).sections}


def test_a_section_is_one_line_of_the_table_and_one_template(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = '<h2 id="seeds">Seeds</h2><p>{{ content | join(", ") }}</p>'
    read = report.text
    more = Section("seeds", "Seeds of the run", lambda page: sorted({row["seed"] for row in page.rows}))
    monkeypatch.setattr(report.page, "SECTIONS", (*SECTIONS, more))
    monkeypatch.setattr(report, "text", lambda name: drawn if name == "sections/seeds.html.j2" else read(name))
    report.template.cache_clear()
    text = render(sample())
    report.template.cache_clear()
    assert '<a href="#seeds">Seeds of the run</a>' in text
    assert '<h2 id="seeds">Seeds</h2><p>0</p>' in text


def test_the_threat_model_is_one_sentence() -> None:
    told = Page(sample()).threat
    assert re.fullmatch(r"[^.]*(al\. )?[^.]*\.", told), told
    assert "predict through it" in told
    assert "averag" not in told


def test_it_says_what_a_reader_could_get_wrong() -> None:
    page = render(sample())
    assert "exact binomial ones" in page
    assert "clearest 33.0" in page
    assert "worst 33.0" not in page
    assert "From the folder where it was started" in page
    assert repeat.command(sample()) == "gradleak audit --config runs/sample/run.toml --out runs/sample-again"
    inside = sample(folder=Path.cwd() / "runs" / "my run")
    assert repeat.command(inside) == "gradleak audit --config 'runs/my run/run.toml' --out 'runs/my run-again'"
    assert "QUICK RUN" in Page(sample(settings={"trial": True})).subtitle


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
    lines = [summary(certified=Certified.of(rows[:4], KINDS["image"]()))]
    lines += [
        summary(
            defence="fedsam", form="adaptive", cells=("b" * 16,), certified=Certified.of(rows[4:], KINDS["image"]())
        )
    ]
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


def test_what_the_layers_told_is_a_table_for_each_line() -> None:
    assert 'id="spans"' not in render(sample()), "no certificates, no section"
    layers = (LayerCertificate("features.3", unexplained=2e-7), LayerCertificate("features.9", 64, 64, 3e-8, 0.02))
    whole = SpanCertificate(4, "features.9", (3e-6, 1e-7, 2e-6, 5e-6), 4, layers)
    partly = SpanCertificate(4, "features.9", (3e-6, None), 1, layers[1:], "Two have too small a loss.")
    none = SpanCertificate(1, "", (), 0, (LayerCertificate(HOSTILE, 3, 4),), HOSTILE)
    plain = [row("a" * 16, target, 30.0, spans=each.record()) for target, each in enumerate((whole, partly))]
    other = [row("b" * 16, 0, 9.0, defence="fedsam", form="adaptive", spans=none.record())]
    lines = [summary(), summary(defence="fedsam", form="adaptive", cells=("b" * 16,))]
    result = sample(rows=[*plain, row("a" * 16, 2, 30.0, spans=None), row("a" * 16, 3, 30.0), *other], summaries=lines)
    first, second = contents(result)["spans"]
    assert first.caption == "ig:steps=10, B = 1, round 0."
    assert [[cell.text for cell in line.cells] for line in first.rows] == [
        ["client-0", "4 of 4", "4 of 4", "5.0e-06", "2.5e-06", "features.3 to features.9",
         "4 of 4 examples are told by layer features.9: this is proved without the truth."],
        ["client-1", "2 of 4", "1 of 4", "-", "3.0e-06", "features.9", "1 of 4 examples are told by layer features.9: "
         "this is proved without the truth. The others are open. Two have too small a loss."],
    ]  # fmt: skip
    assert [line.cells[2].tone for line in (*first.rows, *second.rows)] == ["bad", "warn", "void"]
    assert first.rows[0].cells[5].note == (
        "features.3: unexplained 2.0e-07; features.9: rank 64 of 64, unexplained 3.0e-08, next solution 2.0e-02"
    )
    assert [cell.text for cell in second.rows[0].cells[3:6]] == ["-", "-", "none"]
    assert second.rows[0].cells[6].text.startswith("No layer tells the examples apart.")
    text = render(result)
    assert Reader(text).open == []
    assert "<script>" not in text.split('id="spans"')[1].split("</section>")[0]


def test_many_targets_of_a_line_are_counted() -> None:
    found = SpanCertificate(1, "0", (0.0,), 1, ()).record()
    rows = [row("a" * 16, target, 30.0, targets=40, spans=found) for target in range(40)]
    [table] = span_tables(rows, [summary()])
    assert len(table.rows) == 32
    assert table.caption.endswith("; 8 more targets in rows.jsonl.")


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
    shares = re.findall(r'class="number">(?:<span[^>]*>)?([\d.]+)\N{NO-BREAK SPACE}%', told)
    assert shares == ["75", "0", "25", "50", "0"]
    assert told.count('<span class="tag void">50\N{NO-BREAK SPACE}%</span>') == 1, "the headline is marked"
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
    told = render(sample(summaries=lines)).split('h2 id="utility"')[1].split("</section>")[0]
    assert "93.1%" in told
    assert "0.2100" in told
    assert "<script>" not in told
    assert told.index('"row" class="number">0<') < told.index('"row" class="number">20<')


def test_a_missing_reference_is_called_untested() -> None:
    rows = [row("b" * 16, target, 8.0, defence="fedsam", form="naive") for target in range(4)]
    untested = Page(sample(rows=rows)).untested
    assert any("without a defence" in line for line in untested)
    assert any("who know the defence" in line for line in untested)
    assert not any("without a defence" in line for line in Page(sample()).untested)


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
    text = render(bad)
    page = Reader(text)
    assert page.open == []
    assert len(page.named("script")) == 1
    assert "alert" not in text.split("<script>")[1].split("</script>")[0]
    assert not page.named("img")
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert {attributes.get("data-attack") for attributes in page.cards} == {HOSTILE.partition(":")[0]}


def test_each_private_image_is_shown_once_per_defence_and_the_best_recovered_first() -> None:
    weak = [row("b" * 16, target, 5.0, attack="dlg") for target in range(4)]  # the same images, recovered less well
    result = sample(rows=[row("a" * 16, target, 15.0 + 5 * target) for target in range(4)] + weak)
    shown = [card for card in Reader(render(result)).cards if "id" in card]  # those of the control have none
    assert [float(card["data-psnr"] or "nan") for card in shown] == [30.0, 25.0, 20.0, 15.0]
    assert [card["id"] for card in shown] == [f"target-{'a' * 16}-{target}-0" for target in (3, 2, 1, 0)]
    assert {card["data-attack"] for card in shown} == {"ig"}


def test_every_picture_has_a_text() -> None:
    page = Reader(render(sample()))
    assert len(page.pictures) == 3 * len(page.cards) == 3 * (8 + 3)  # two defences and the control
    for attributes in page.pictures:
        assert attributes["role"] == "img"
        assert attributes["aria-label"]


def test_no_address_in_the_page_is_given_twice() -> None:
    names = [attributes["id"] for _, attributes in Reader(render(sample())).tags if "id" in attributes]
    assert len(names) == len(set(names))


def decoded(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def kept(targets: int = 4, count: int = 5) -> dict[str, Tensor]:
    """Snapshots and restarts as a run keeps them: brighter from one to the next, and from target to target."""
    levels = torch.arange(count).view(-1, 1, 1, 1, 1, 1) * 40 + torch.arange(targets).view(1, -1, 1, 1, 1, 1)
    film = levels.expand(count, targets, 2, 3, 8, 8).clone().byte()
    film[:, :, 1] = 255
    return {
        "snapshots/step": torch.arange(count).mul(10).expand(targets, count), "snapshots/x": film,
        "restarts/x": film.transpose(0, 1)[:, :3], "restarts/match": torch.rand(targets, 3),
    }  # fmt: skip


def filmed(arrays: dict[str, Tensor]) -> Any:
    rows = [
        row("a" * 16, target, 20.0, examples=2, assignment=[1, 0], restart=1, gallery_size=[9, 9],
            scores={name: [20.0, 21.0] for name in ("psnr", "ssim", "mse", "rank")}, hits={"recovered": [True, False]})
        for target in range(4)
    ]  # fmt: skip
    pair = torch.rand(4, 2, 3, 8, 8)
    images = {"a" * 16: {"true": pair, "found": pair}}
    return sample(images, rows=rows, store=SimpleNamespace(arrays=lambda cell: arrays))


def test_pictures_along_the_way_belong_to_their_target_example_and_step() -> None:
    found = gallery.gallery(result := filmed(kept()), result.rows)
    assert found is not None
    assert found.moving
    shot = next(shot for shot in found.shots if shot.anchor.endswith("-2-1"))  # matched to reconstruction 0
    assert shot.steps is not None
    assert shot.steps.words == ("0", "10", "20", "30", "40")
    drawn = decoded(shot.steps.uri)
    assert drawn.size == (5 * 8, 8)
    for place in range(5):
        assert abs(drawn.getpixel((8 * place + 4, 4))[0] - (40 * place + 2)) < 8
    assert shot.restarts is not None
    assert len(shot.restarts.words) == 3
    assert shot.chosen == 1
    other = next(shot for shot in found.shots if shot.anchor.endswith("-2-0"))
    assert other.steps is not None
    assert decoded(other.steps.uri).getpixel((4, 4))[0] > 240
    [card, *_] = [card for card in Reader(render(result)).cards if card.get("id") == shot.anchor]
    assert card["data-steps"] == "0 10 20 30 40"
    assert card["data-chosen"] == "1"


def test_a_run_without_pictures_along_the_way_says_so() -> None:
    assert "kept no pictures along the way" in render(sample())
    assert "kept no pictures along the way" not in render(filmed(kept()))
    still = kept() | {
        "snapshots/step": torch.zeros(4, 5, dtype=torch.long)
    }  # an attack without steps, such as analytic
    assert "kept no pictures along the way" in render(filmed(still))


@pytest.mark.parametrize("name", ["snapshots/step", "snapshots/x", "restarts/x", "restarts/match"])
def test_pictures_that_do_not_fit_the_rows_are_refused(name: str) -> None:
    arrays = kept()
    with pytest.raises(BadRun, match="do not fit its rows"):
        render(filmed(arrays | {name: arrays[name][:, :-1] if arrays[name].dim() == 2 else arrays[name][..., 0]}))


def test_the_search_is_drawn_on_a_logarithmic_scale() -> None:
    [card, *_] = Reader(render(sample())).cards
    assert card["data-search"] == "0:1 5:0.001 9:0.0001"
    assert 'd="M0 2L50 17L100 22"' in render(sample())
    dead = {"step": torch.tensor([0, 1]), "match": torch.full((2, 4), torch.nan)}
    assert "data-search=" not in render(sample(trace=lambda cell: dead)).split("<script>")[0]
    with pytest.raises(BadRun, match="trace/match"):
        render(sample(trace=lambda cell: {**dead, "match": dead["match"][:, :1]}))


def test_a_failed_control_and_inconclusive_lines_never_look_safe() -> None:
    failed = Control(False, 4.0, "4 dB only.", "a" * 16)
    text = render(sample(positive_control=failed, verdict=Verdict("void", "-", "-")))
    assert "this run shows nothing" in text
    assert 'class="verdict void"' in text
    assert text.count('<tr class="hatched">') == 2, "the inconclusive line, and its defence"
    found = matrix([summary(), summary(defence="fedsam", form="adaptive", **NOTHING)], void=True)
    assert found is not None
    assert all(square.hatched for row in found.rows for square in row.squares)


def test_the_matrix_shows_the_strongest_attacker_and_hatches_what_did_not_converge() -> None:
    none = dict.fromkeys(("recovered", "excess", "identified"), Rate(0.0, 0.0, 0.3, 9))
    found = matrix(
        [
            summary(round=3),
            summary(defence="clip", form="naive", converged=1.0, rates={}, **none),
            summary(defence="clip", form="adaptive", recovered=Rate(0.25, 0.1, 0.5, 4), converged=0.5),
            summary(attack="dlg", **NOTHING),
            summary(attack="dlg", defence="clip", form="naive", converged=1.0, **none, rates={"rank1": none["excess"]}),
            summary(attack="old", targets=0, errors=("ValueError: no",), **none),
        ],
        void=False,
    )
    assert found is not None
    assert found.defences == ("none", "clip")
    (best, clip), (open_, safe), (failed, not_run) = (row.squares for row in found.rows)
    assert (best.text, best.shade, best.hatched) == ("75\N{NO-BREAK SPACE}%", 3, False)
    assert "[40, 100], 24.0 dB, round 3" in best.note
    assert (clip.shade, clip.hatched) == (1, True)
    assert "adaptive" in clip.note
    assert "converged on 50" in clip.note
    assert (open_.text, open_.shade, open_.hatched) == ("inconclusive", -1, True)
    assert (safe.text, safe.shade, safe.hatched) == ("0\N{NO-BREAK SPACE}%", 0, False)
    assert (failed.text, failed.hatched, not_run.text, not_run.hatched) == ("failed", True, "not run", True)


def test_re_identified_images_are_not_a_zero() -> None:
    none = Rate(0.0, 0.0, 0.3, 9)
    line = summary(
        recovered=none, excess=none, identified=Rate(0.8, 0.5, 1.0, 9), rates={"rank1": Rate(0.9, 0.6, 1.0, 9)}
    )
    assert line.word == "leaks in part"
    found = matrix([line], void=False)
    assert found is not None
    [[square]] = [row.squares for row in found.rows]
    assert (square.text, square.shade) == ("re-identified", 1)


def test_failed_cells_and_checks_are_listed_gravest_first_and_once() -> None:
    note = {"name": "sparse update", "severity": "note", "text": "half", "fix": "name it"}
    rows = [row("a" * 16, 0, 20.0, checks=[note]), row("a" * 16, 1, 20.0, checks=[note])]
    rows.append(row("b" * 16, None, 0.0, status="failed", error="ValueError: no", scores=None))
    text = render(sample(rows=rows)).split('<h2 id="checks"')[1].split("</section>")[0]
    assert text.index("ValueError: no") < text.index("sparse update")
    assert '<td class="number">2</td>' in text
    assert text.count("sparse update") == 1
    assert "ig:steps=10 / none / undefended / round 0" in text


def test_deleted_arrays_leave_a_report_without_pictures() -> None:
    def gone(cell: str, name: str = "x") -> dict[str, Tensor]:
        raise BadRun(cell)

    result = sample()
    result.pairs = result.trace = result.store.arrays = gone
    page = Reader(render(result))
    assert page.open == []
    assert not page.pictures
    assert not page.cards


def test_many_large_images_stay_a_modest_file() -> None:
    true = torch.rand(300, 1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    rows = [row("a" * 16, target, 10.0 + target / 10) for target in range(300)]
    text = render(sample(images={"a" * 16: {"true": true, "found": true}}, rows=rows))
    found = re.search(r"(\d+) less well recovered images", text)
    assert found is not None
    assert len(Reader(text).cards) == 300 - int(found[1]) + 3
    assert 0.9 * gallery.ROOM < len(text) < 15e6


def test_leakage_over_rounds_needs_two_and_shows_what_a_study_or_the_run_measured() -> None:
    assert rounds([summary()], [], None) is None
    lines = [summary(round=number, recovered=Rate(number / 10, 0.0, 1.0, 4)) for number in (0, 5)]
    lines += [summary(round=number, form="naive", defence="clip", **NOTHING) for number in (0, 5)]
    grid = [row("a" * 16, 0, 20.0, round=number, analyses={"trace": 3.0 + number}) for number in (0, 5)]
    found = rounds(lines, grid, None)
    assert found is not None
    shares = found.leakage[0]
    assert [line.name for line in shares.lines] == ["ig:steps=10 undefended", "ig:steps=10 against clip, naive"]
    assert all(mark.hollow for mark in shares.lines[1].marks)
    assert [tick.text for tick in shares.y][-1] == "100"
    assert [drawn.title for drawn in found.curvature] == ["trace"]
    assert "8 at round 5" in found.curvature[0].text
    assert not found.hint
    empty = rounds(lines, [], None)
    assert empty is not None
    assert "gradleak analyse" in empty.hint
    curve = SimpleNamespace(rounds=(0, 5), values=(1.0, 2.0), low=(0.5, 1.5), high=(1.5, 2.5), doubtful=(5,))
    study: Any = SimpleNamespace(folder=Path("runs/study"), curves={"highest": curve})
    beside = rounds(lines, grid, study)
    assert beside is not None
    assert [drawn.title for drawn in beside.curvature] == ["Largest eigenvalue of the Hessian"]
    text = render(sample(summaries=lines, rows=grid), study)
    assert Reader(text).open == []
    assert "From study." in text


def test_privacy_against_utility_is_a_point_for_each_defence_and_round() -> None:
    assert scatter([summary(trained=Trained(5, "none", 0.2, 0.9))]) is None
    lines = [
        summary(round=number, defence=name, form=form, recovered=Rate(share, 0, 1, 4),
                trained=Trained(number, "none", 0.2, accuracy))
        for name, form, number, share, accuracy in (
            ("none", "undefended", 0, 1.0, 0.1), ("none", "undefended", 5, 0.5, 0.9), ("clip", "naive", 5, 0.25, 0.9)
        )
    ]  # fmt: skip
    found = scatter([*lines, summary(round=9, trained=Trained(9, "none"))])
    assert found is not None
    assert [line.name for line in found.lines] == ["undefended, round 0", "undefended, round 5", "clip, round 5"]
    assert "25 at test accuracy, % 90" in found.text
    assert found.across == "test accuracy, %"
    heights = [line.marks[0].y for line in found.lines]
    assert heights == sorted(heights)


def attacks_untested(rows: list[dict[str, Any]]) -> str:
    return "\n".join(line for line in untested(rows, []) if "attack" in line or "auto" in line)


def test_members_that_auto_ran_are_not_called_untested() -> None:
    told = attacks_untested([row("a" * 16, 0, 20.0, attack="auto:preset=quick")])
    [idle] = [line for line in told.split("\n") if "that this version has" in line]
    named = idle.partition(": ")[2].rstrip(".").split(", ")
    assert not {"ig", "cpl", "second-order", "auto"} & set(named)
    assert {"dlg", "idlg"} <= set(named), "idlg is no member of the quick preset"
    assert "which of them it ran is not recorded" in told
    assert "idlg" not in attacks_untested([row("a" * 16, 0, 20.0, attack="auto")]).split("Those members")[0]
    tried = [
        {"member": "cpl", "attack": "cpl", "outcome": "ran"},
        {"member": "ig", "attack": "ig", "outcome": "refused", "why": "-"},
    ]
    told = attacks_untested([row("a" * 16, 0, 20.0, attack="auto:preset=quick", tried=tried)])
    [idle] = [line for line in told.split("\n") if "that this version has" in line]
    named = idle.partition(": ")[2].rstrip(".").split(", ")
    assert "cpl" not in named
    assert "ig" in named, "it was refused"
    assert "not recorded" not in told


def test_references_name_parts_of_a_composed_defence_and_what_auto_ran() -> None:
    tried = [{"member": "cpl", "attack": "cpl", "outcome": "ran"}]
    rows = [row("a" * 16, 0, 20.0, attack="auto", tried=tried, defence="clipping:norm=1 + pruning", form="naive")]
    names = {reference.name for reference in contents(sample(rows=rows))["references"]}
    assert names == {"auto", "cpl", "clipping", "pruning", "threat levels"}


def test_the_evidence_sheet_has_assumptions_tests_results_and_limits() -> None:
    page = Page(sample())
    parts = {part.name: dict(part.entries) for part in contents(sample())["evidence"]}
    assert list(parts) == ["System", "Assumptions", "Tests", "Results", "Limits", "Provenance"]
    assert parts["Assumptions"]["threat model"] == (page.threat,)
    assert parts["Tests"]["measure"] == (
        "an image counts as recovered when SSIM is above 0.5, PSNR above 18 dB, and no other real image of a gallery "
        "is nearer to the reconstruction",
    )
    assert parts["Results"]["undefended"] == ("leaks. ig recovered 75 % of the images.",)
    assert parts["Results"]["fedsam"] == ("inconclusive. The attack did not converge.",)
    assert parts["Limits"]["not tested"] == page.untested
    assert parts["Provenance"]["to repeat"] == (repeat.command(sample()),)
    sheet = render(sample()).split('class="sheet"')[1]
    assert "The attack did not converge." in sheet


def test_every_assumption_is_in_the_ledger() -> None:
    told = render(sample()).split('<h2 id="assumptions"')[1].split("</section>")[0]
    for each in ("model and loss", "labels", "recipe", "batch statistics", "private data"):
        assert each in told, each


def test_scores_that_are_missing_or_infinite_are_dashes() -> None:
    nothing = Rate(float("nan"), float("nan"), float("nan"), 0)
    rates = dict.fromkeys(("recovered", "excess", "identified"), nothing)
    line = summary(**rates, rates={}, means={}, worst={}, targets=0, errors=("ValueError",))
    text = render(sample(summaries=[line], rows=[]))
    assert "nan" not in text.split("<h2")[1]
    assert "failed" in text


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_survive_what_diverged(channels: int) -> None:
    image = torch.full((channels, 5, 7), torch.nan)
    image[:, 0] = torch.inf
    drawn = pictures.picture(image)
    assert drawn.size == (7, 5)
    assert drawn.getextrema() == ((0, 255) if channels == 1 else ((0, 255),) * 3)
    assert pictures.difference(image, torch.zeros_like(image)).max() == 1


def test_values_beyond_the_range_of_a_picture_are_black_or_white() -> None:
    image = torch.tensor([[[-3.0, -0.5, 0.0, 0.2, 1.0, 1.5, 7.0]]])
    assert list(pictures.picture(image).tobytes()) == [0, 0, 0, 51, 255, 255, 255]


def test_only_images_are_drawn() -> None:
    with pytest.raises(ValueError, match="shape"):
        pictures.picture(torch.zeros(4, 4))
    assert not pictures.drawable((2, 8, 8))
    assert pictures.sheet([("a", [torch.zeros(1, 8, 8)]), ("b", [torch.ones(1, 8, 8)] * 2)]).size[0] > 2 * 96
