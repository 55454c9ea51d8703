"""Federated LoRA fine-tuning of a language model in Flower: recorded, replayed, and audited as text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import gradleak as gl
from conftest import largest_difference
from gradleak import adapters
from gradleak.audit.output import describe, write
from gradleak.audit.recorded import RecordedAudit, _whole, blind, read, replay_text, replays, summary
from gradleak.audit.result import AuditResult
from gradleak.cli import app
from gradleak.identify import replay_error
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import BadObservation

pytest.importorskip("flwr")
pytest.importorskip("transformers", reason="transformers is not installed (extra `zoo`)")
peft = pytest.importorskip("peft", reason="peft is not installed (extra `zoo`)")

from flwr.app import ArrayRecord, Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM  # noqa: E402

from gradleak import flower  # noqa: E402

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::gradleak.flower.SensitiveRecording")]

EXAMPLE = Path(__file__).parents[1] / "examples" / "flower-lora"
ENGINE = gl.Engine(device="cpu")
PADDING, LENGTH = 40, 6


# --- the example ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The modules of examples/flower-lora."""
    before = list(sys.path)
    sys.path.insert(0, str(EXAMPLE))
    try:
        from tuned import client_app, server_app, task  # type: ignore[import-not-found]

        yield SimpleNamespace(client=client_app, server=server_app, task=task)
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "tuned"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def ran(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients that are canaries, two rounds, one sentence each: the folder with `seen` and `truth`."""
    home = tmp_path_factory.mktemp("lora")
    settings = {"out": str(home / "seen"), "truth": str(home / "truth"), "num-server-rounds": 2, "lr": 0.1}
    settings |= {"examples": 1, "defence": "none"}
    grid = flower.InProcess(example.client.app, 2, run_config=settings)
    example.server.main(grid, Context(1, 0, {}, RecordDict(), settings))
    return home


def test_only_adapters_travel(example: Any, ran: Path) -> None:
    """Files hold PEFT's short names; the audit gives them the model's, and takes frozen weights from the model."""
    task = example.task.task()
    raw = [gl.Observation.load(path) for path in sorted((ran / "seen").glob("*.safetensors"))]
    assert len(raw) == 4
    for one in raw:
        assert one.weights.keys() == example.task.adapters(task.model).keys()
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in one.weights)
        assert one.buffers is None
    for one in read(ran / "seen", task):
        assert one.seen.weights.keys() == task.weights().keys()
        view = TargetView.of(task, one.seen, gl.Knowledge())
        assert view.buffers is not None
        assert view.buffers.keys() == task.buffers().keys()
    assert largest_difference(read(ran / "seen", task)[0].seen.weights, task.weights()) == 0


def test_the_recipe_reproduces_the_updates(example: Any, ran: Path) -> None:
    task = example.task.task()
    recorded = read(ran / "seen", task, ran / "truth")
    right = replay_text(replays(task, recorded, gl.LocalTraining(lr=0.1)), recorded, gl.LocalTraining(lr=0.1))
    assert "reproduces 4 of 4 updates" in right
    wrong = replay_text(replays(task, recorded, gl.LocalTraining(lr=0.2)), recorded, gl.LocalTraining(lr=0.2))
    assert "reproduces 0 of 4 updates" in wrong


def test_the_update_is_that_of_the_users_own_loop(example: Any, ran: Path) -> None:
    """Hugging Face's loss of the loader's batch: padding, mask and labels are read as the model itself reads them."""
    model, task = example.task.network(), example.task.task()
    model(**example.task.examples(0, 2, 1, 1)).loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    seen = next(one.seen for one in read(ran / "seen", task) if one.name == "round0001-node1")
    assert largest_difference(seen.update, {name: 0.1 * value for name, value in gradient.items()}) < 1e-6
    assert max(float(value.abs().max()) for value in seen.update.values()) > 1e-4


def test_canaries_keep_the_batch_of_their_loader(example: Any, ran: Path) -> None:
    """Truth under input_ids, attention_mask and labels is renamed; labels repeat x and are left out."""
    [first, *_] = read(ran / "seen", example.task.task(), ran / "truth")
    assert first.truth is not None
    assert first.truth.keys() == {"x", "attention_mask"}
    text = bytes(token for token in first.truth["x"][0].tolist() if token != example.task.PADDING)
    assert text.decode() == example.task.SENTENCES[0]


def test_the_sentences_come_back_without_their_truth(example: Any, ran: Path, tmp_path: Path) -> None:
    """The first round of LoRA: the text, padding and last token included, replays to rounding."""
    task = example.task.task()
    first = read(ran / "seen", task, rounds=[1])
    found = blind(task, first, ["span-text"], gl.Knowledge(training=gl.LocalTraining(lr=0.1)), tmp_path, engine=ENGINE)
    assert [row["word"] for row in found] == ["explained", "explained"]
    assert all(row["replay"]["error"] < 1e-4 for row in found)
    lines = (tmp_path / "span-text" / "reconstruction.txt").read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in lines[1::2]] == example.task.SENTENCES[:2]


def test_the_audit_of_the_example(example: Any, ran: Path, tmp_path: Path) -> None:
    task = example.task.task()
    known = read(ran / "seen", task, ran / "truth", rounds=[1])
    others, training = example.task.others(), gl.LocalTraining(lr=0.1)
    result = RecordedAudit.of(task, known, ("span-text",), training, others, engine=ENGINE).run(tmp_path / "run")
    assert result.positive_control.passed
    assert result.verdict.word == "leaks"
    assert [row["hits"]["recovered"] for row in result.rows if not row["control"]] == [[True], [True]]


def test_the_page_on_language_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks with peft too, which are marked `py`: test_readme.py runs the others where peft is missing."""
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLE.parents[1] / "docs" / "audit-my-language-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec"), names)
    error = replay_error(names["adapted"], names["seen"], names["adapted"].as_batch(names["first"]), names["training"])
    assert error.relative < 1e-4


# --- names of adapters ------------------------------------------------------------------------------------------------


def llama(**settings: Any) -> LlamaForCausalLM:
    config = {"vocab_size": PADDING + 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config |= {"num_hidden_layers": 1, "pad_token_id": PADDING, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager", **settings))


def language(model: Any) -> gl.Task:
    blank = torch.zeros(1, LENGTH, dtype=torch.long)
    batch = {"input_ids": blank, "attention_mask": blank, "labels": blank}
    return gl.Task.supervised(model.eval(), cross_entropy, like=batch, kind=gl.kinds.Tokens(padding=PADDING))


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings})


def classifier() -> tuple[gl.Task, Any]:
    """LoRA of a text classifier trains the whole head too."""
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    settings = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
    model = peft.get_peft_model(BertForSequenceClassification(config), lora(**settings)).eval()
    ids = torch.zeros(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": torch.zeros(1, dtype=torch.long)}
    return gl.Task.supervised(model, cross_entropy, like=batch), model


def wrapped(adapter: str = "default", **settings: Any) -> tuple[gl.Task, Any]:
    model = peft.get_peft_model(llama(), lora(**settings), adapter_name=adapter)
    return language(model), model


def injected() -> tuple[gl.Task, Any]:
    """Adapters without PEFT's wrapper."""
    model = peft.inject_adapter_in_model(lora(), llama())
    return language(model), model


MADE = {
    "default": wrapped,
    "another adapter name": lambda: wrapped("mine"),
    "DoRA": lambda: wrapped(use_dora=True),
    "embedding and head": lambda: wrapped(target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
    "classifier": classifier,
    "injected": injected,
}
SPELLED = {
    "as PEFT gives them": lambda state: state,
    "without PEFT's prefix": lambda state: {name.removeprefix("base_model.model."): v for name, v in state.items()},
    "DataParallel": lambda state: {f"module.{name}": value for name, value in state.items()},
    "arrays": lambda state: {name: value.numpy() for name, value in state.items()},
    "a list": lambda state: {str(number): value for number, value in enumerate(state.values())},
}


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("made", MADE)
def test_state_dicts_of_adapters_are_observations(made: str, spelled: str) -> None:
    """Whatever the names, each tensor's change arrives under the model's own name; nothing frozen is asked for."""
    task, model = MADE[made]()
    state = peft.get_peft_model_state_dict(model, adapter_name="mine" if "another" in made else "default",
                                           save_embedding_layers=False)  # fmt: skip
    assert len(state) == len(task.weights())
    step = {name: 0.01 * (number + 1) for number, name in enumerate(state)}
    after = {name: value - step[name] for name, value in state.items()}
    before, after = ({name: value.clone() for name, value in part.items()} for part in (state, after))
    seen = adapters.from_state_dicts(SPELLED[spelled](before), SPELLED[spelled](after), 1, task=task)
    assert seen.weights.keys() == task.weights().keys()
    assert largest_difference(seen.weights, task.weights()) == 0
    moved = [float(value.mean()) for value in seen.update.values()]
    assert sorted(moved) == pytest.approx(list(step.values()), rel=1e-3)  # each once
    for name, own in adapters.own_names(before, task).items():
        assert torch.equal(before[name], task.weights()[own])
        assert float(seen.update[own].mean()) == pytest.approx(step[name], rel=1e-3)


def test_a_file_recorded_without_the_task_is_named_later() -> None:
    task, model = wrapped()
    before = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    after = {name: value + 0.5 for name, value in before.items()}
    seen = adapters.fitted(adapters.from_state_dicts(before, after, 1), task)
    assert seen.weights.keys() == task.weights().keys()
    assert seen.returned_buffers is None
    assert all(float((value + 0.5).abs().max()) < 1e-5 for value in seen.update.values())


def test_the_whole_model_of_peft_is_an_observation_too() -> None:
    """A server that sends everything: frozen weights are buffers, under the model's names."""
    task, model = wrapped()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = {name: value + ("lora_" in name) for name, value in before.items()}
    seen = adapters.from_state_dicts(before, after, 1, task=task)
    assert seen.weights.keys() == task.weights().keys()
    assert seen.buffers is not None
    assert "base_model.model.model.embed_tokens.weight" in seen.buffers


def test_adapters_of_another_model_are_refused() -> None:
    task, _ = wrapped(target_modules=["q_proj"])
    _, other = wrapped()
    state = {name: value.clone() for name, value in peft.get_peft_model_state_dict(other).items()}
    with pytest.raises(BadObservation, match="the model has no 'base_model.model.model.layers.0.self_attn.v_proj"):
        adapters.from_state_dicts(state, state, 1, task=task)
    short = dict(list(state.items())[:1])
    with pytest.raises(BadObservation, match="it lacks 'base_model.model.model.layers.0.self_attn.q_proj.lora_B"):
        adapters.from_state_dicts(short, short, 1, task=task)
    numbered = {str(number): value for number, value in enumerate(state.values())}
    with pytest.raises(BadObservation, match="a list of 4 arrays without names"):
        adapters.from_state_dicts(numbered, numbered, 1, task=task)


def test_a_tap_with_the_task_of_another_model_still_records(tmp_path: Path) -> None:
    """A training goes on whatever the task says; what is recorded is sorted, or refused, by the audit."""
    task, model = wrapped()
    other, _ = wrapped(target_modules=["q_proj"])
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        return flower.train(message, context, task, padded(TEXTS[0]), gl.LocalTraining(lr=0.1))

    for keep, wanted in (("observations", "recorded"), ("aggregate", "answered")):
        for known in (task, other, None):
            tap = flower.Tap(FedAvg(fraction_evaluate=0.0), out=tmp_path / "seen", task=known, keep=keep)
            state = ArrayRecord(peft.get_peft_model_state_dict(model))
            tap.start(flower.InProcess(client, 2), state, num_rounds=1)
            rows = flower.rows_of(tap.folder)
            assert [row["status"] for row in rows if row.get("node") is not None] == [wanted] * 2, rows


# --- audits of texts --------------------------------------------------------------------------------------------------


TEXTS = [[7, 3, 9, 11], [5, 6, 5, 8, 2, 4]]
WORDS = tuple(f"word{number}" for number in range(PADDING)) + ("",)


def reading() -> gl.Task:
    """A model whose embedding is trained beside the adapters, so that its rows name the tokens."""
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), lora(modules_to_save=["embed_tokens"]))
    blank = torch.zeros(1, LENGTH, dtype=torch.long)
    kind = gl.kinds.Tokens(padding=PADDING, words=WORDS)
    batch = {"input_ids": blank, "attention_mask": blank, "labels": blank}
    return gl.Task.supervised(model.eval(), cross_entropy, like=batch, kind=kind)


def padded(*texts: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([text + [PADDING] * (LENGTH - len(text)) for text in texts])
    mask = (ids != PADDING).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def recording(task: gl.Task, folder: Path) -> None:
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        batch = padded(TEXTS[int(context.node_config["partition-id"])])
        flower.keep_truth(folder / "truth", message, context, batch)
        return flower.train(message, context, task, batch, gl.LocalTraining(lr=0.5))

    tap = flower.Tap(FedAvg(fraction_evaluate=0.0), out=folder / "seen", task=task)
    tap.start(flower.InProcess(client, 2), ArrayRecord(peft.get_peft_model_state_dict(task.model)), num_rounds=1)


def test_texts_without_their_truth_are_written_and_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = reading()
    recording(task, tmp_path)
    recorded = read(tmp_path / "seen", task)
    knows = gl.Knowledge(training=gl.LocalTraining(lr=0.5))
    found = blind(task, recorded, ["token-rows"], knows, tmp_path / "out", engine=ENGINE)
    assert [row["labels"] for row in found] == [{}, {}]
    assert all(row["replay"] is not None for row in found)  # unknown places count as padding, which the mask leaves out
    assert all(row["word"] != "determined" for row in found)
    printed = summary(found) + capsys.readouterr().out
    assert "how close the reconstructions are; nothing here says that a client is safe" in printed
    assert not any(word in printed for word in WORDS[:PADDING])
    assert not any(word in (tmp_path / "out" / "findings.jsonl").read_text() for word in WORDS[:PADDING])
    lines = (tmp_path / "out" / "token-rows" / "reconstruction.txt").read_text(encoding="utf-8").splitlines()
    assert lines[::2] == ["round0001-node1", "round0001-node2"]
    for line, text in zip(lines[1::2], TEXTS, strict=True):
        assert set(line.split()) == {WORDS[token] for token in text[:-1]}  # nothing follows the last token
    assert str(tmp_path) not in json.dumps(found)


def test_a_text_that_explains_its_update_is_found_to(tmp_path: Path) -> None:
    """With the right text a blind audit replays the client's own batch, padding and mask included."""
    task = reading()
    recording(task, tmp_path)
    one = read(tmp_path / "seen", task)[0]
    right = torch.tensor([TEXTS[0] + [-1] * (LENGTH - len(TEXTS[0]))])
    other = right.where(right != TEXTS[0][1], TEXTS[0][1] + 1)
    for x, low, high in ((right, 0.0, 1e-3), (other, 0.1, 10.0)):
        batch = _whole(task, {"x": x})
        assert batch is not None
        assert low <= replay_error(task, one.seen, batch, gl.LocalTraining(lr=0.5)).relative < high
    bare = gl.Field((LENGTH,), classes=PADDING + 1, kind=gl.kinds.Tokens())
    unpadded = gl.Task(task.model, task.objective, {**task.fields, "x": bare})
    assert _whole(unpadded, {"x": right}) is None  # where nothing says what fills a text, unknown places stay unknown


def test_the_command_audits_texts_with_their_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, control, verdict and report; no text is printed."""
    task = reading()
    recording(task, tmp_path)
    monkeypatch.chdir(tmp_path)
    here = Path(__file__).parent
    (tmp_path / "app.py").write_text(
        f"import sys\nsys.path.insert(0, {str(here)!r})\nfrom test_flower_text import padded, reading\n"
        "task = reading()\nothers = padded(*[[n, n + 1, 3 * n + 1, 39 - n] for n in range(12)])\n"
    )
    words = ["--observations", "seen", "--truth", "truth", "--task", "app.py:task", "--data", "app.py:others"]
    words += ["--lr", "0.5", "-a", "token-rows", "--device", "cpu", "-o", "run", "--plain"]
    done = CliRunner().invoke(app, ["audit", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "2 observations in seen, 2 with their examples." in done.output
    assert "reproduces 2 of 2 updates" in done.output
    assert not any(word in done.output for word in WORDS[:PADDING])
    result = AuditResult.load(tmp_path / "run")
    attacked = [row for row in result.rows if not row["control"]]
    assert {row["observation"] for row in attacked} == {"round0001-node1", "round0001-node2"}
    assert [row["scores"]["bag"] for row in attacked] == [[3 / 4], [4 / 6]]  # not the last, and each once
    assert all(row["analyses"]["replay_error"] < 1e-3 for row in attacked)
    assert WORDS[7] in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_one_attack_prints_no_text(tmp_path: Path) -> None:
    """`gradleak attack` writes the text into its folder."""
    task = reading()
    recording(task, tmp_path)
    seen = [one.seen for one in read(tmp_path / "seen", task)]
    result = gl.attacks.get("token-rows").run(task, seen, gl.Knowledge(), engine=ENGINE)
    assert "x:" not in describe(result)
    files = [path.name for path in write(result, tmp_path / "out")]
    assert files == ["reconstruction.safetensors", "reconstruction.txt"]


def test_a_replay_that_diverges_reproduces_nothing() -> None:
    """NaN has no distance from anything; it must not read as none."""
    task = reading()
    batch = task.as_batch(padded(TEXTS[1]))
    seen = gl.observe(task, batch, gl.LocalTraining(lr=0.5))
    error = replay_error(task, seen, batch, gl.LocalTraining(lr=1e30, steps=3))
    assert error.relative == float("inf")


def test_running_text_of_bytes_and_of_words() -> None:
    letters = gl.kinds.Tokens(padding=256, words=(*map(chr, range(256)), ""))
    text = torch.tensor([*b"It is\nI\\n.", -1, *b"!", 256, 256, -1])
    assert letters.text(text) == "It is\\nI\\\\n.\ufffd!"
    words = gl.kinds.Tokens(words=("the", "whale"))
    assert words.text(torch.tensor([0, 1, -1, 1, -1])) == "the whale \ufffd whale"
    assert gl.kinds.Tokens().text(torch.tensor([3, 4])) == "3 4"
    assert words.text(torch.tensor([-1, -1])) == ""
    assert gl.kinds.Vector().text(torch.zeros(3)) == ""
