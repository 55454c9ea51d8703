"""Texts from the first command to the report, as a new user meets them; and what went wrong on this way before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import gradleak as gl
from conftest import reproduction
from gradleak.cli import app
from gradleak.models.language import Positions, decoder
from gradleak.parts import embeddings
from gradleak.scenario.kinds import Tokens
from gradleak.scenario.task import Task

PAPER = Path(__file__).parent.parent / "papers" / "text"
RECIPE = gl.LocalTraining(lr=0.1)
FILE = """
import torch
import gradleak as gl
from gradleak.models.language import decoder

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
model = decoder(width=96, length=16, positions="rotary", generator=generator)
ids = torch.zeros(1, 16, dtype=torch.long)
task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(ids,), kind=gl.kinds.Tokens(padding=0))
own = {"x": gl.data.load("moby-dick-samples").fitted(16, 0).x[:2]}
"""


def language_task(positions: Positions = "rotary", width: int = 96, length: int = 16) -> Task:
    model = decoder(width=width, length=length, positions=positions, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(1, length, dtype=torch.long)
    return Task.supervised(model, cross_entropy, like=(ids,), kind=Tokens(padding=0))


def sentences(count: int, length: int = 16) -> Tensor:
    return gl.data.load("moby-dick-samples").fitted(length, 0).x[:count]


@dataclass(frozen=True)
class Place:
    """A folder with a file of the user's, and the command line in it."""

    folder: Path

    def __call__(self, *words: str, code: int = 0) -> str:
        answer = CliRunner().invoke(app, [*words])
        assert answer.exit_code == code, answer.output
        assert "Traceback" not in answer.output
        return " ".join(answer.output.split())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


# --- the command line -------------------------------------------------------------------------------------------------


def test_an_audit_of_texts_without_any_attack_named(place: Place) -> None:
    defences = "none,dp-sgd:clip=1,noise_multiplier=1"
    data = ("mine.py:task", "--data", "moby-dick-samples", "--examples", "2")
    out = place("audit", *data, "--targets", "1", "--defence", defences, "--out", "run")
    assert "attacks span-text, token-rows" in re.sub(r"[|`-]+ ", "", out)
    assert "Positive control passed: span-text" in out
    assert "Undefended: leaks. span-text recovered 2 of 2 texts" in out
    headline = out[out.index("NOT SHOWN TO LEAK.") :]
    assert "Guarantee: (4.38, 1e-05)-differential privacy of one example" in headline, "the verdict states its epsilon"
    page = (place.folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "2 of 2 examples are told by layer blocks.0.attention.out" in page
    assert re.search(r"blocks\.0\.attention\.query: rank \d+", page), "layers have their ranks"
    assert "no figures" not in page


def test_the_gate_blocks_an_update_of_texts(place: Place) -> None:
    own = {"x": sentences(2)}
    gl.observe(language_task(), own, RECIPE).save(place.folder / "update.safetensors")
    file = ("gate", "update.safetensors", "--task", "mine.py:task", "--lr", "0.1")
    assert "BLOCK. 2 of 2 texts come back from this update" in place(*file, "--data", "mine.py:own", code=1)
    assert "BLOCK." in place(*file, code=1)


def test_a_table_given_for_texts_is_told_what_it_lacks(place: Place) -> None:
    lines = "\n".join(f"Sentence {number}.,{'ab'[number % 2]}" for number in range(8))
    (place.folder / "texts.csv").write_text(f"text,label\n{lines}\n")
    words = ("audit", "mine.py:task", "--data", "texts.csv", "--out", "run")
    assert 'need a tokenizer: tokenizer="bytes", or --tokenizer' in place(*words, code=2)


# --- what went wrong --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def false_alarms() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PAPER))  # it imports its neighbours
        yield reproduction("text", "false_alarms")


def test_no_candidate_at_the_first_place_is_no_crash(false_alarms: ModuleType) -> None:
    """Noise hides the tokens of the first place: then no text begins, and the bag of the other places is left."""
    row = false_alarms.Row.of(7)
    found = false_alarms.attacked(row, false_alarms.Source.of(row.tokens))
    assert (found["ordered"], found["proved"], found["others"]) == (0, 0, 0)


class Normed(nn.Module):
    """Small inputs, whose mean square is not far above the rounding of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(0.01 * x))


def test_a_norm_without_epsilon_is_the_same_in_another_type() -> None:
    x, y = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    task = Task.supervised(Normed(), cross_entropy, like=(x, y))
    double = task.to("cpu", torch.float64)
    single = task.gradient(task.weights(), {"x": x, "y": y})
    exact = double.gradient(double.weights(), {"x": x.double(), "y": y})
    for name, value in exact.items():
        torch.testing.assert_close(single[name].double(), value, rtol=1e-5, atol=1e-6)
    assert task.model.norm.eps is None, "the user's model does not change"


def test_auto_searches_no_further_for_texts_that_are_found() -> None:
    task, x = language_task(), sentences(2)
    found = gl.attacks.get("auto").run(task, gl.observe(task, {"x": x}, RECIPE), gl.Knowledge(training=RECIPE))
    outcomes = {each["member"]: each["outcome"] for each in found.settings["tried"]}
    assert outcomes == {"span-text": "ran", "token-rows": "left out", "tag": "left out", "lamp": "left out"}
    shown = {tuple(token for token in text.tolist() if token > 0) for text in found.target(0)["x"]}
    assert shown == {tuple(token for token in text.tolist() if token > 0) for text in x}


def test_the_model_is_asked_once_which_module_embeds_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = list[str](), embeddings._embeddings_of
    monkeypatch.setattr(embeddings, "_embeddings_of", lambda task, name: [asked.append(name), ask(task, name)][1])
    task = language_task()
    assert not gl.attacks.get("lamp").refuses(task)
    assert asked == ["x"]


def test_which_texts_are_proved() -> None:
    task, x = language_task(), sentences(2)
    found = gl.attacks.get("span-text").run(task, gl.observe(task, {"x": x}, RECIPE), gl.Knowledge(training=RECIPE))
    assert found.settings["sure"] == [[True, True]]
    assert sum(found.settings["sure"][0]) == found.settings["spans"][0]["proved"]


def test_one_token_again_and_again_is_no_proof_of_its_length() -> None:
    task, x = language_task(), torch.zeros(1, 16, dtype=torch.long)
    x[0, :9] = 42
    found = gl.attacks.get("span-text").run(task, gl.observe(task, {"x": x}, RECIPE), gl.Knowledge(training=RECIPE))
    shown = found.target(0)["x"][0]
    assert set(shown[shown >= 0].tolist()) == {42}
    assert int((shown >= 0).sum()) < 9, "this text is not the client's"
    assert found.settings["sure"] == [[False]]


# --- false alarms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ([1, 2, 3, 4], "right"),
        ([1, 2, 3], "right"),  # without the last token
        ([1, 2, 3, 9], "right"),
        ([1, 2], "cut"),
        ([1, 2, 3, 4, 5], "wrong"),
        ([1, 9, 3, 4], "wrong"),
        ([5, 6, 3, 4], "wrong"),  # of two texts
    ],
)
def test_what_counts_as_a_client_s_text(false_alarms: ModuleType, found: list[int], word: str) -> None:
    assert false_alarms.beside(found, [[1, 2, 3, 4], [5, 6, 7, 8]]) == word


def test_the_stored_false_alarms_keep_their_bound(false_alarms: ModuleType) -> None:
    stored = json.loads((PAPER / "false_alarms.json").read_text(encoding="utf-8"))
    assert stored["summary"] == false_alarms.summary(stored["rows"])
    assert len(stored["rows"]) >= 200
    assert not stored["commit"]["dirty"]
    alarms = sum(line["wrong"] + line["cut"] + line["others"] > 0 for line in stored["rows"])
    assert alarms <= stored["bound"] * len(stored["rows"])
    assert stored["summary"]["right"] >= 100, "there is something that could be wrong"


@pytest.mark.slow
def test_a_sample_of_false_alarms_comes_out_again(false_alarms: ModuleType) -> None:
    stored = json.loads((PAPER / "false_alarms.json").read_text(encoding="utf-8"))["rows"]
    for line in stored[:40]:
        row = false_alarms.Row.of(line["seed"])
        again = false_alarms.attacked(row, false_alarms.Source.of(row.tokens))
        assert (again["wrong"], again["cut"], again["others"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_models_of_transformers_from_end_to_end(shape: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if shape == "gpt2":
        sizes = {"n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=257, **sizes))
    else:
        sizes = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=257, pad_token_id=0, **sizes))
    ids = torch.ones(1, 16, dtype=torch.long)
    like = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    task = Task.supervised(model.eval(), cross_entropy, like=like, kind=Tokens(padding=0))
    federation = gl.Federation(examples=2, training=RECIPE)
    data = gl.data.load("moby-dick-samples")
    result = gl.Audit(task, data, attacks=["span-text"], federation=federation, targets=2).run(tmp_path / "run")
    assert result.verdict.word == "leaks"
    assert "4 of 4 texts" in str(result.verdict)
