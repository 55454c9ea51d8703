"""`gradleak analyse`: the figures are those of the checkpoints, the work resumes, the page says what it shows."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradleak as gl
from gradleak.audit.result import AuditResult
from gradleak.cli import loading
from gradleak.core.configuration import from_toml
from gradleak.curvature.association import partial_spearman, spearman
from gradleak.curvature.hessian import dense, exact, hessian
from gradleak.curvature.measure import Measurement, settled
from gradleak.curvature.page import _psnr
from gradleak.curvature.study import Information, Lanczos, Leakage, Study, StudyError, StudyResult, associated
from gradleak.federation.checkpoints import Checkpoints
from gradleak.report.curves import Series, chart
from test_cli import Answer, refused
from test_report import HOSTILE, Reader

pytestmark = pytest.mark.xdist_group("analyse")  # what is analysed is made once

USER_FILE = """
import torch
from torch import nn
import gradleak as gl

def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 3))

like = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
task = gl.Task.supervised(network(0), nn.functional.cross_entropy, like=like)
other = gl.Task.supervised(network(1), nn.functional.cross_entropy, like=like)
linear = gl.Task.supervised(nn.Sequential(network(0), nn.LogSoftmax(1)), nn.functional.nll_loss, like=like)
y = torch.arange(36) % 3
x = (torch.rand(36, 1, 8, 8, generator=torch.Generator().manual_seed(1)) + y[:, None, None, None]) / 4
images = gl.data.Images(x, y, 3, tuple("abc"), "made up")
"""
WEIGHTS = 4 * 9 + 4 + 36 * 3 + 3
ROUNDS = (0, 1, 2, 3, 4, 5, 6, 7)
SMALL = ("--examples", 20, "--probes", 4, "--steps", 30)
FROM = ("analyse", "--from", "trained", *SMALL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training of seven rounds, audits of it and of other weights, and an analysis."""
    home = tmp_path_factory.mktemp("analyse")
    (home / "train.py").write_text(USER_FILE)
    with pytest.MonkeyPatch.context() as patch, own_modules():
        patch.chdir(home)
        trained = ("train", "train.py:task", "--data", "train.py:images", "--holdout", 0, "--clients", 2)
        trained += ("--per-round", 2, "--steps", 5, "--batch-size", 6, "--lr", 0.5, "--rounds", 7)
        for seed in range(2):
            words = (*trained, "--checkpoints", ",".join(map(str, ROUNDS)), "--seed", seed)
            assert Answer(*words, "-o", f"trained{seed or ''}").code == 0
        attacked = ("--attack", "ig:steps=4", "--targets", 2)
        assert Answer("audit", "--from", "trained", *attacked, "-d", "none,pruning", "-o", "audit").code == 0
        assert Answer("audit", "--from", "trained1", *attacked, "-o", "audit1").code == 0
        own = ("audit", "train.py:task", "--data", "train.py:images", *attacked, "--lr", 0.1, "--quick", "-o", "own")
        assert Answer(*own).code == 0
        answer = Answer(*FROM, "--audit", "audit", "-o", "study")
        assert answer.code == 0, answer
        (home / "told.txt").write_text(answer.out)
    return home


class own_modules:
    """The user's modules and path do not stay."""

    def __enter__(self) -> None:
        self.path = list(sys.path)

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self.path
        for name in [name for name in sys.modules if name.startswith("gradleak_user_")]:
            del sys.modules[name]


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What was made, in the current folder of the test and in its own copy."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with own_modules():
        yield tmp_path


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "analysis.jsonl").read_text().splitlines()]


def study_of(**changes: Any) -> Study:
    task, images = loading.task("train.py:task"), loading.images("train.py:images")
    settings: dict[str, Any] = {"trained": Checkpoints(Path("trained")), "examples": 20, "lanczos": Lanczos(4, 30)}
    return Study(task, images, **{**settings, **changes})


# --- the figures -----------------------------------------------------------------------------------------------------


def test_every_checkpoint_has_the_curvature_of_its_own_weights(here: Path) -> None:
    held = rows("study")
    assert [row["round"] for row in held] == list(ROUNDS)
    study = study_of()
    for row in (held[0], held[7]):
        sent, found = study.trained.at(row["round"]), row["curvature"]  # type: ignore[union-attr]
        matrix = dense(hessian(study.task, sent.weights, study.measured.batch))
        truth = exact(hessian(study.task, sent.weights, study.measured.batch))
        log_det = found["log_determinant"]
        size = len(matrix)
        assert log_det["floor"] == pytest.approx(size / 2 * math.log(1e-3))
        assert log_det["excess"] == pytest.approx(log_det["value"] - log_det["floor"])
        squares = truth.eigenvalues.square()
        assert abs(log_det["value"] - float(0.5 * (squares + 1e-3).log().sum())) < 4 * log_det["error"]
        assert found["extremes"]["highest"] == pytest.approx(float(truth.eigenvalues.max()), rel=1e-3)
        assert abs(found["trace"]["value"] - float(matrix.trace())) < 4 * found["trace"]["standard_error"]
        gradient = study.task.gradient(sent.weights, study.measured.batch)
        assert found["gradient_norm"] == pytest.approx(float(gl.tree.norm(gradient)), rel=1e-4)
    assert held[0]["curvature"]["gradient_norm"] != held[7]["curvature"]["gradient_norm"]


def test_psnr_is_that_of_the_audit_and_each_attacker_has_a_curve(here: Path) -> None:
    held = json.loads(Path("study/analysis.json").read_text())
    curves = {(each["defence"], each["form"]): each for each in held["leakage"]}
    assert {("none", "undefended"), ("pruning", "naive"), ("pruning", "adaptive")} <= set(curves)
    scored = [json.loads(line) for line in Path("audit/rows.jsonl").read_text().splitlines()]
    for (defence, form), curve in curves.items():
        assert curve["rounds"] == list(ROUNDS)
        for number, psnr, error in zip(ROUNDS, curve["psnr"], curve["error"], strict=True):
            same = {"defence": defence, "form": form, "round": number, "control": False}
            own = [row["scores"]["psnr"][0] for row in scored if same.items() <= row.items()]
            assert len(own) == 2
            assert psnr == pytest.approx(sum(own) / 2)
            assert error == pytest.approx(abs(own[0] - own[1]) / 2)


def test_associations_are_rank_correlations_of_the_very_curves(here: Path) -> None:
    held = json.loads(Path("study/analysis.json").read_text())
    found = held["associations"][0]
    assert found["rounds"] == list(ROUNDS)
    psnr = held["leakage"][0]["psnr"]
    norm = [row["curvature"]["gradient_norm"] for row in held["rounds"]]
    trace = [row["curvature"]["trace"]["value"] for row in held["rounds"]]
    plain, partial = spearman(trace, psnr), partial_spearman(trace, psnr, [norm, list(ROUNDS)])
    own = found["curves"]["trace"]
    assert (own["plain"]["value"], own["plain"]["low"]) == (plain.value, plain.low)
    assert (own["partial"]["value"], own["partial"]["high"]) == (partial.value, partial.high)
    assert own["plain"]["count"] == 8
    assert own["plain"]["small"]
    assert {"log_determinant", "highest", "gradient_norm", "loss", "round"} <= set(found["curves"])


def test_several_trainings_are_resampled_as_wholes(here: Path) -> None:
    first = StudyResult.load("study", ["audit"])
    other = study_of(trained=Checkpoints(Path("trained1")))
    second = other.run(audits=["audit1"])
    assert [each.runs for each in associated([first])] == [1] * len(first.leakages)
    found = associated([first, second])
    assert [each.leakage for each in found] == ["ig:steps=4 undefended, B = 1"], "only what both audits attacked"
    plain = found[0].found["trace"].plain
    assert plain is not None
    assert plain.count == 2
    assert plain.unit == "runs of 8 rounds"
    each = [spearman(run.curves["trace"].values, run.leakages[0].psnr).value for run in (first, second)]
    assert plain.value == pytest.approx(sum(each) / 2)


def test_two_audits_of_one_kind_keep_their_own_psnr(here: Path) -> None:
    """The second's curve is held against its own scores, and every heading says whose they are."""
    shutil.copytree("audit", "later")
    path = Path("later/rows.jsonl")
    scored = [json.loads(line) for line in path.read_text().splitlines()]
    for row in scored:
        row["scores"]["psnr"] = [value + (row["round"] * 5) % 8 for value in row["scores"]["psnr"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in scored))
    result = StudyResult.load("study", ["audit", "later", "./audit"])
    half = len(result.leakages) // 2
    assert [one.audit for one in result.leakages] == ["audit"] * half + ["later"] * half
    trace = result.curves["trace"].values
    for one, found in zip(result.leakages, result.associated, strict=True):
        assert found.leakage == f"{one.name} ({one.audit})"
        plain = found.found["trace"].plain
        assert plain is not None
        assert plain.value == spearman(trace, one.psnr).value
    first, second = (result.associated[place].found["trace"].plain for place in (0, half))
    assert first != second
    result.report("both.html")
    headings = Path("both.html").read_text().split('id="associations"')[1].split("</section>")[0]
    assert "B = 1 (audit)</h3>" in headings
    assert "B = 1 (later)</h3>" in headings
    assert "B = 1 (later)" in result.table()
    alone = StudyResult.load("study", ["audit"])
    assert len(associated([result, alone])) == 2 * half
    with pytest.raises(ValueError, match=r"from 2 audits \(audit, later\).*Load it with one audit of the kind"):
        associated([alone, result])


def test_audits_in_folders_of_one_name_are_told_apart_by_their_paths(here: Path) -> None:
    shutil.copytree("audit", "other/audit")
    result = StudyResult.load("study", ["audit", "other/audit"])
    assert {one.audit for one in result.leakages} == {"audit", "other/audit"}
    assert len({found.leakage for found in result.associated}) == len(result.leakages)


# --- what people see -------------------------------------------------------------------------------------------------


def test_the_terminal_shows_a_table_and_where_the_page_is(here: Path) -> None:
    told = Path("told.txt").read_text()
    assert re.search(r"^7 +[\d.]+ +[\d.]+ +-[\d.]+ +[\d.]+ +[\d.]+ ", told, re.MULTILINE)
    assert f"Floor of the log det: {WEIGHTS / 2 * math.log(1e-3):.1f} (damping 0.001)" in told
    assert re.search(r"ig:steps=4 undefended, B = 1 +log det +[+-][\d.]+ \[", told)
    assert "8 rounds in blocks of 2 (small)" in told
    assert "no evidence" in told
    assert "Page: study/analysis.html" in told


def test_the_page_shows_every_curve_its_figures_and_what_they_do_not_mean(here: Path) -> None:
    text = Path("study/analysis.html").read_text()
    page = Reader(text)
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert "http:" not in text
    assert "https:" not in text
    for title in (
        "Log-determinant",
        "Largest and smallest eigenvalue",
        "Trace",
        "Gradient norm",
        "PSNR of the attacks",
    ):
        assert f"<h3>{title}" in text
    for row in rows("study"):
        assert f"{row['curvature']['log_determinant']['value']:.1f}" in text
    first = text.split("<h3>Log-determinant")[1].split("</li>")[0]
    assert first.count("<circle") == 8
    assert 'class="band"' in first
    assert 'class="floor"' in first
    assert "no curvature at all" in first
    assert re.search(r"<desc[^>]*>Log-determinant\. Hessian: -[\d.]+ at round 0,", first)
    related = text.split('id="associations"')[1].split("</section>")[0]
    assert related.count("<h3>") == len(json.loads(Path("study/analysis.json").read_text())["leakage"])
    assert "8 rounds in blocks of 2 (small), of 8 rounds that were both attacked and analysed" in related
    assert "small sample" in related
    meaning = text.split('id="meaning"')[1].split("</section>")[0]
    assert "no evidence" in meaning
    assert "Do not compare it between architectures" in meaning


def test_caveats_of_an_audit_stand_at_the_head_of_the_page(here: Path) -> None:
    quick = ("audit", "--from", "trained", "--rounds", "0,3", "--attack", "ig:steps=4", "--quick", "-o", "quick")
    assert Answer(*quick).code == 0
    answer = Answer(*FROM, "--rounds", "0,3", "--audit", "quick", "-o", "study")
    assert answer.code == 0, answer
    assert "quick is a quick run: its PSNR means nothing." in answer.out
    assert "Read with care" in Path("study/analysis.html").read_text()
    assert "2 rounds: too few" in answer.out


def test_attacks_that_did_not_converge_are_marked_and_named(here: Path) -> None:
    audit = AuditResult.load("audit")
    for row in audit.rows:
        row["converged"] = row["defence"] != "pruning" or row["round"] not in (2, 5)
    held = StudyResult.load("study")
    result = StudyResult.of(held.rows, held.settings, held.environment, held.folder, [audit])
    poor = [one for one in result.leakages if one.defence == "pruning"]
    assert poor
    assert {one.name: one.doubtful for one in result.leakages if one.doubtful} == {one.name: (2, 5) for one in poor}
    for one in poor:
        (note,) = [note for note in result.notes if note.startswith(one.name)]
        assert "converged on fewer than 80% of its targets at rounds 2, 5" in note
        assert re.search(rf"^{re.escape(one.name)} +[\d.]+ +[\d.]+ +~[\d.]+ +[\d.]+ +[\d.]+ +~", result.table(), re.M)
    result.report("poor.html")
    text = Path("poor.html").read_text()
    drawn = text.split("<h3>PSNR of the attacks")[1].split("</li>")[0]
    whole = chart("PSNR", list(_psnr(result.leakages)))
    assert sum(mark.hollow for line in whole.lines for mark in line.marks) == 2 * len(poor)
    assert drawn.count("hollow") == 2 * len(poor)
    assert text.count("converged on 0%") == 2 * len(poor)
    assert "Read with care" in text
    assert result.to_json()["leakage"][-1]["doubtful"] == [2, 5]


def test_controls_are_said_to_be_controlled_for_the_other_one_only(here: Path) -> None:
    held = json.loads(Path("study/analysis.json").read_text())
    norm = [row["curvature"]["gradient_norm"] for row in held["rounds"]]
    own = held["associations"][0]["curves"]["gradient_norm"]["partial"]
    assert own["value"] == partial_spearman(norm, held["leakage"][0]["psnr"], [list(ROUNDS)]).value
    assert "given the other one only" in Path("told.txt").read_text()
    assert "each given the other one only" in Path("study/analysis.html").read_text()


def test_hostile_text_stays_text(here: Path) -> None:
    result = StudyResult.load("study", ["audit"])
    leak = replace(result.leakages[0], attack=HOSTILE, audit=HOSTILE)
    settings = {**result.settings, HOSTILE: HOSTILE}
    bad = StudyResult(result.rows, settings, {HOSTILE: HOSTILE}, None, (leak,), (HOSTILE,))
    bad.report("bad.html")
    page = Reader(Path("bad.html").read_text())
    assert page.open == []
    assert not {"script", "img"} & {tag for tag, _ in page.tags}


def test_a_chart_keeps_its_values_inside_and_says_them() -> None:
    drawn = chart("One", [Series("line", [0, 10], [1.0, 3.0], [0.5, 2.0], [1.5, 4.0], [False, True])], floor=(0.0, "0"))
    (line,) = drawn.lines
    assert [mark.hollow for mark in line.marks] == [False, True]
    assert line.marks[0].y > line.marks[1].y, "higher values stand higher"
    numbers = [float(n) for n in re.findall(r"[\d.]+", line.band)]
    assert all(drawn.left <= x <= drawn.right for x in numbers[::2])
    assert all(drawn.top <= y <= drawn.bottom for y in numbers[1::2])
    assert drawn.floor is not None
    assert drawn.floor.place > max(numbers[1::2])
    assert "1 at round 0, 3 at round 10" in drawn.text
    alone = chart("Alone", [Series("point", [0], [5.0], [4.0], [6.0])])
    assert alone.lines[0].line == alone.lines[0].band == ""
    whisker = alone.lines[0].marks[0].whisker
    assert whisker is not None
    assert whisker[0] > whisker[1]
    assert len(chart("Flat", [Series("zero", [0, 1], [0.0, 0.0])]).y) > 2
    assert chart("Many", [Series("line", range(100), range(100))]).x[-1].text == "99"
    with pytest.raises(ValueError, match="no values"):
        chart("None", [])


@pytest.mark.browser
@pytest.mark.system
def test_a_browser_shows_the_page_without_asking_the_network(here: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    place = (here / "study" / "analysis.html").as_uri()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1200), ("dark", 390)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            asked: list[str] = []
            told: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, told=told: told.append(message.text))
            page.goto(place)
            assert asked == [place]
            assert not told, "the browser complains"
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
            stroke = page.evaluate("getComputedStyle(document.querySelector('.chart .line')).stroke")
            assert stroke == {"light": "rgb(31, 95, 179)", "dark": "rgb(138, 184, 240)"}[scheme]
        browser.close()


# --- folders ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_analysis_goes_on_and_measures_nothing_twice(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, calls = Measurement.at, []

    def interrupted(self: Measurement, number: int, sent: Any) -> Any:
        if number == 2 and 2 not in calls:
            calls.append(number)
            raise KeyboardInterrupt
        calls.append(number)
        return measured(self, number, sent)

    monkeypatch.setattr("gradleak.cli.sys.argv", ["gradleak", "analyse", "--from", "trained"])
    monkeypatch.setattr(Measurement, "at", interrupted)
    words = (*FROM, "--rounds", "0-3", "-o", "again")
    answer = Answer(*words)
    assert answer.code == 130, answer
    assert "2 of 4 rounds are kept in again; the same command resumes." in answer.errors
    assert "Go on with: gradleak analyse --from trained" in answer.errors
    with open("again/analysis.jsonl", "ab") as file:
        file.write(b'{"version": 1, "round": 2, "curv')  # a line that was in flight
    more = Answer(*words)
    assert more.code == 0, more
    assert calls == [0, 1, 2, 2, 3]
    assert "round 0: kept from before" in more.errors
    for own, whole in zip(rows("again"), rows("study")):
        for row in (own, whole):
            row["curvature"].pop("seconds")
        assert own == whole
    environment = json.loads(Path("again/environment.json").read_text())
    assert len(environment["resumed"]) == 1
    assert "git" in environment


def test_more_rounds_go_into_the_same_folder_other_settings_do_not(here: Path) -> None:
    words = (*FROM, "-o", "again")
    assert Answer(*words, "--rounds", "0").code == 0
    answer = Answer(*words, "--rounds", "0,2")
    assert answer.code == 0, answer
    assert [row["round"] for row in rows("again")] == [0, 2]
    settings = from_toml(Path("again/analysis.toml").read_text())
    assert settings["origin"]["trained_with"] == "none"
    assert settings["lanczos"] == {"probes": 4, "steps": 30, "most_steps": 400, "damping": 1e-3, "seed": 0}
    told = refused(*words, "--rounds", "0", "--damping", 0.01)
    assert "holds an analysis with other settings. They differ in lanczos.damping (0.001 there, 0.01 now)" in told
    other = ("analyse", "train.py:other", "--data", "train.py:images", *SMALL)
    assert "They differ in the task (layers, weights," in refused(*other, "-o", "again")
    assert re.search(r"audit holds \S+ and no analysis", refused(*FROM, "-o", "audit"))
    assert "is not the folder of an analysis" in str(pytest.raises(ValueError, StudyResult.load, "audit").value)


def test_weights_that_were_trained_anew_are_not_taken_for_the_old(here: Path) -> None:
    shutil.rmtree("trained")
    shutil.copytree("trained1", "trained")
    assert "has measured other weights at round 1" in refused(*FROM, "-o", "study")
    unnamed = Answer(*FROM, "--rounds", "0")
    assert "Page: runs/analysis-trained/analysis.html" in unnamed.out


# --- beyond curvature ------------------------------------------------------------------------------------------------


def test_information_is_labelled_for_what_it_is(here: Path) -> None:
    words = (*FROM, "--rounds", "0,7", "--information", "--gauss-newton", "--releases", 30, "-o", "more")
    answer = Answer(*words)
    assert answer.code == 0, answer
    assert "curvature index (not a bound)" in answer.out
    for row in rows("more"):
        held = row["information"]
        assert held["index"]["label"] == "curvature index (not a bound on information)"
        log_det = row["curvature"]["log_determinant"]["value"]
        assert held["index"]["determinant"] == pytest.approx(WEIGHTS / 2 * math.log(2 * math.pi * math.e) + log_det / 2)
        assert held["channel"]["counts"][-1] == 30
        assert held["channel"]["nats"][-1][0] > held["channel"]["nats"][-1][2] > 0
        assert held["sharpness"]["worst"] >= held["sharpness"]["one_step"]
        top = held["sharpness"]["top"]
        assert top["accepted"]
        assert top["residual"] <= 1e-3 * row["curvature"]["extremes"]["highest"]
        assert held["sharpness"]["curvature_bound"] > 0.9 * row["curvature"]["extremes"]["highest"]
        assert set(held["covariance"]) == {"hessian", "gauss_newton"}
        assert held["covariance"]["hessian"]["samples"] == 20
        lowest = row["gauss_newton"]["extremes"]["lowest"]
        assert lowest > -1e-9, "the Gauss-Newton matrix has no negative eigenvalue"
    text = Path("more/analysis.html").read_text()
    told = text.split('id="information"')[1].split("</section>")[0]
    assert "The curvature index is not a bound on information" in told
    assert "curvature index (not a bound on information), log det" in told
    assert "lambda_max, Gauss-Newton" in text


def test_a_defence_changes_what_is_released_and_not_the_curvature(here: Path) -> None:
    plain = study_of(rounds=[0], information=Information(releases=20)).run().rows[0]
    sam = study_of(rounds=[0], information=Information(gl.defences.FedSAM(rho=0.5), releases=20)).run().rows[0]
    assert sam["curvature"]["log_determinant"] == plain["curvature"]["log_determinant"]
    assert sam["information"]["channel"]["nats"] != plain["information"]["channel"]["nats"]
    assert sam["information"]["covariance"] == plain["information"]["covariance"]


def network(*last: nn.Module, norm: bool = False) -> gl.Task:
    """A small network on the images of the user's file."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, stride=2), *([nn.BatchNorm2d(4)] if norm else []), nn.Sigmoid(), nn.Flatten()]
    like = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(nn.Sequential(*layers, nn.Linear(36, 3), *last), cross_entropy, like=like)


def informed(task: gl.Task) -> Study:
    asked = Information(releases=16)
    return Study(task, loading.images("train.py:images"), examples=12, lanczos=Lanczos(2, 20), information=asked)


def test_the_covariance_is_held_against_the_curvature_of_one_mode_the_channel_is_the_clients(here: Path) -> None:
    training, calm = network(norm=True), network(norm=True)
    calm.model.eval()
    assert training.model.training
    own, other = informed(training).run().rows[0], informed(calm).run().rows[0]
    assert own["curvature"]["trace"] == other["curvature"]["trace"]
    assert own["information"]["covariance"] == other["information"]["covariance"]
    assert own["information"]["channel"]["nats"] != other["information"]["channel"]["nats"]
    batch = informed(training).measured.batch
    plain = gl.curvature.releases(calm, calm.weights(), batch)
    assert own["information"]["covariance"]["hessian"]["traces"][0] == pytest.approx(float(plain.spectrum.sum()))
    assert training.model.training, "the task is left alone"


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (nn.BatchNorm1d(3), "A client with one example cannot train this model: BatchNorm in training mode"),
        (nn.Dropout(0.5), "What clients release cannot be measured. The model draws random numbers"),
    ],
)
def test_what_one_example_cannot_train_is_found_out_before_anything_is_measured(
    here: Path, last: nn.Module, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = informed(network(last))
    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "at", lambda *_: pytest.fail("it was measured"))
        with pytest.raises(StudyError, match=re.escape(told)):
            study.run("out")
        assert not Path("out").exists()
    replace(study, information=None).check()
    study.task.model.eval()
    assert replace(study).run().rows[0]["information"]["channel"]["nats"]


def test_a_defence_that_steers_the_training_must_be_the_one_that_was_trained_with(here: Path) -> None:
    words = ("train", "train.py:task", "--data", "train.py:images", "--holdout", 0, "--clients", 2, "--per-round", 2)
    words += ("--steps", 1, "--batch-size", 6, "--lr", 0.5, "--rounds", 2, "--checkpoints", "0,2")
    answer = Answer(*words, "--defence", "fedgf", "-o", "guided")
    assert answer.code == 0, answer
    few = ("--examples", 10, "--probes", 2, "--steps", 5, "--most-steps", 5, "--releases", 10, "--information")
    analysed = ("analyse", "--from", "guided", *few)
    right = Answer(*analysed, "--defence", "fedgf", "-o", "right")
    assert right.code == 0, right
    assert [row["round"] for row in rows("right")] == [0, 2]
    for place, defence in (("trained", "fedgf"), ("guided", "fedgf:rho=0.123")):
        told = refused("analyse", "--from", place, *few, "--defence", defence, "-o", "wrong")
        assert "or what the server sends along in a round" in told
        assert f"{place} was trained with" in told
        assert not Path("wrong").exists()
    assert Answer(*analysed, "--defence", "fedsam", "-o", "local").code == 0, (
        "what a client does alone fits any weights"
    )


def test_an_eigenvector_that_has_not_settled_is_told(here: Path) -> None:
    held = study_of(rounds=[0], information=Information(releases=12)).run()
    row = held.rows[0]
    assert row["information"]["sharpness"]["top"]["accepted"] is True
    row["information"]["sharpness"]["top"] = {"accepted": False, "residual": 0.25}
    held.report("far.html")
    assert "eigenvector not settled: 0.2" in Path("far.html").read_text()
    assert not settled(1.0, 0.25, (-1.0, 1.0))
    assert settled(1.0, 1e-4, (-1.0, 1.0))


def test_without_a_training_the_own_weights_are_round_0(here: Path) -> None:
    words = ("analyse", "train.py:task", "--data", "train.py:images", *SMALL)
    answer = Answer(*words)
    assert answer.code == 0, answer
    assert "Page: runs/analysis-train/analysis.html" in answer.out
    own, first = rows("runs/analysis-train")[0], rows("study")[0]
    assert own["weights"] == first["weights"]
    assert own["curvature"]["log_determinant"] == first["curvature"]["log_determinant"]
    scored = Answer(*words, "--audit", "own")
    assert scored.code == 0, scored
    assert "too few" in scored.out
    assert "own is a quick run" in scored.out


def test_without_any_argument_there_is_something_to_analyse(here: Path) -> None:
    answer = Answer("analyse", "--examples", 4, "--probes", 2, "--steps", 2, "--most-steps", 2)
    assert answer.code == 0, answer
    assert "1 checkpoint of 8,026 weights, 4 examples: about" in answer.errors
    assert "NOT converged" in answer.errors
    assert re.search(r"^0 .* ~-\d", answer.out, re.MULTILINE), "what has not converged is marked"
    assert "log det: not converged at round 0" in Path("runs/analysis-builtin/analysis.html").read_text()


def test_a_training_that_was_started_from_python_needs_to_be_told_its_task(here: Path) -> None:
    path = Path("trained/training.toml")
    path.write_text(re.sub(r"\[origin\][^\[]*", "", path.read_text()))
    assert "started from Python. Name them: gradleak analyse FILE.py:task" in refused(*FROM)
    named = ("analyse", "train.py:task", "--data", "train.py:images", "--from", "trained", "--rounds", "0", *SMALL)
    assert Answer(*named).code == 0
    assert "is a training of another task" in refused(
        "analyse", "train.py:other", "--data", "train.py:images", "--from", "trained", *SMALL
    )


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", "nowhere"), "nowhere holds no training"),
        (("--from", "trained", "--rounds", "0,9"), "no checkpoint of round 9; there are: 0, 1, 2, 3, 4, 5, 6, 7."),
        (("--from", "trained", "--rounds", "soon"), "--rounds must be whole numbers"),
        (("--from", "trained", "--data", "digits"), "leave --data out"),
        (("--from", "trained", "--audit", "nowhere"), "not the folder of a run"),
        (("--from", "trained", "--audit", "own"), "attacked weights of its own, not those of trained"),
        (("--from", "trained", "--audit", "audit1"), "attacked other weights than those of trained"),
        (("--from", "trained", "--defence", "fedsam"), "--information looks at: give both"),
        (("--from", "trained", "--rho", "0.3"), "--rho 0.3 is a setting of --information"),
        (("--from", "trained", "--releases", "9"), "--releases 9 is a setting of --information"),
        (("--from", "trained", "--information", "--defence", "fedsma"), "Did you mean 'fedsam'"),
        (("--from", "trained", "--information", "--one-by-one"), "leave --information or --one-by-one out"),
        (("--from", "trained", "--damping", "0"), "damping must be above 0"),
        (("--from", "trained", "--probes", "1"), "--probes"),
        (("train.py:task",), "Say on which images train.py:task is analysed"),
        (("train.py:task", "--data", "train.py:images", "--rounds", "3"), "only round 0"),
        (("train.py:task", "--data", "train.py:images", "--audit", "audit"), "checkpoints of a training: say which"),
        (("train.py:other", "--data", "train.py:images", "--audit", "own"), "own attacked another task"),
        (("train.py:linear", "--data", "train.py:images", "--gauss-newton"), "This task has no Gauss-Newton matrix."),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_measured(
    here: Path, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it was measured")

    monkeypatch.setattr(Measurement, "at", never)
    assert told in refused("analyse", *words, "-o", "out")
    assert not Path("out").exists()


def test_a_training_without_checkpoints_says_so(here: Path) -> None:
    shutil.rmtree("trained/checkpoints")
    assert "trained holds no checkpoints" in refused(*FROM)


def test_a_round_that_diverged_is_named(here: Path) -> None:
    study = study_of()
    sent = study.sent(3)
    broken = sent._replace(weights={name: value * math.nan for name, value in sent.weights.items()})
    with pytest.raises(StudyError, match=r"Round 3 cannot be measured\. The loss at these weights is nan.*--rounds"):
        study._row(3, broken)


def test_settings_that_make_no_sense_are_refused(here: Path) -> None:
    with pytest.raises(StudyError, match="examples must be at least 2"):
        study_of(examples=1)
    with pytest.raises(StudyError, match="whole numbers from 0"):
        study_of(rounds=[-1])
    with pytest.raises(ValueError, match="steps must be from 1"):
        Lanczos(steps=0)
    with pytest.raises(ValueError, match="rho must be above 0"):
        Information(rho=0.0)


def test_a_leakage_is_named_by_what_tells_it_apart() -> None:
    held = ((0,), (20.0,), (None,), (1,), (None,), (1.0,))
    assert Leakage("ig", "fedsam", "adaptive", 4, "run", *held).name == "ig against fedsam, adaptive, B = 4"
    assert Leakage("ig", "none", "undefended", 1, "run", *held).name == "ig undefended, B = 1"


def test_the_analysis_reads_no_truth_and_attacks_do_not_reach_it() -> None:
    """Attack code may import gradleak.identify, and neither package brings results, metrics or the study along."""
    import ast

    for package in ("identify", "curvature"):
        source = Path(gl.__file__).parent / package / "__init__.py"
        named = [node.module for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ImportFrom)]
        assert f"gradleak.{package}.{'hessian' if package == 'curvature' else 'certificates'}" in named
        assert not [name for name in named if name and name.endswith(("association", "study", "gradcam"))]
        assert not [name for name in named if name and name.startswith(("gradleak.audit", "gradleak.metrics"))]
    assert torch.is_tensor(gl.curvature.channel_bound(torch.ones(3), torch.tensor(1.0)))
