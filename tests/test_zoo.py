"""Models that people train: what `check` passes an audit finishes, what it refuses an audit refuses in the same words.

In Python and on the command line, with two steps of each attack: nothing ends in a traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gradleak as gl
from gradleak.audit.cells import named_attacks
from gradleak.audit.preflight import RUNS, Preflight, preflight
from gradleak.audit.private import examples_of
from gradleak.audit.ruling import VOID, WORDS
from gradleak.auto.defaults import default_attacks
from gradleak.cli import app
from gradleak.scenario.fields import UnsupportedTask
from zoo import ZOO, Victim, victim

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
]

# Why check and audit refuse these, in their own words.
REFUSED = {
    "dropout": "dropout is active (dropout (Dropout))",
    "batch-norm-of-one": "a batch of one example fails in this mode",
    "own-kernel": "the gradient cannot be differentiated again",
    "own-kernel-once": "through _Once (autograd.Function) is not the slope of the first",
}
AUDITED = [name for name in ZOO if name not in REFUSED]

FILE = """
from zoo import victim

chosen = victim({name!r})
task, data = chosen.task, chosen.data
"""


def quick(method: str) -> str:
    """The attack with two steps, if it takes steps."""
    name, _, settings = method.partition(":")
    counts = [each for each in ("steps", "fine_steps") if each in gl.registry.entry("attack", name).settings]
    others = [piece for piece in gl.registry.pieces(settings) if piece.partition("=")[0] not in counts]
    return ":".join([name, *filter(None, [",".join([*(f"{each}=2" for each in counts), *others])])])


def examined(model: Victim, attacks: list[str]) -> Preflight:
    few = examples_of(model.data, model.task).batch(torch.arange(4))
    return preflight(model.task, named_attacks(attacks), batch=few)


def attacks_on(task: gl.Task) -> list[str]:
    return [quick(method) for method in default_attacks(gl.Engine(device="cpu"), task)]


def audit_of(model: Victim) -> gl.Audit:
    return gl.Audit(
        model.task, model.data, attacks_on(model.task), targets=1, unrelated=1, engine=gl.Engine(device="cpu")
    )


# --- in Python --------------------------------------------------------------------------------------------------------


def test_there_are_enough_models_of_every_kind() -> None:
    assert len(ZOO) >= 36
    assert set(REFUSED) < set(ZOO)


@pytest.mark.parametrize("name", AUDITED)
def test_what_check_passes_an_audit_finishes(name: str) -> None:
    model = victim(name)
    before = {key: value.clone() for key, value in model.task.model.state_dict().items()}
    checked = examined(model, attacks_on(model.task))
    assert checked.passed
    assert not checked.refusal
    assert all(line.status == RUNS for line in checked.lines)
    result = audit_of(model).run()
    assert result.complete
    assert not result.failed, result.failed[0]
    assert result.verdict.word in (*WORDS, VOID)
    assert "Traceback" not in f"{result.verdict}{result.table()}"
    assert all(torch.equal(value, before[key]) for key, value in model.task.model.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_what_check_refuses_an_audit_refuses_in_the_same_words(name: str) -> None:
    model = victim(name)
    checked = examined(model, attacks_on(model.task))
    assert not checked.passed
    assert REFUSED[name] in checked.refusal
    with pytest.raises(UnsupportedTask) as refusal:
        audit_of(model).run()
    assert str(refusal.value).startswith("unsupported: ")
    assert checked.refusal in str(refusal.value)


@pytest.mark.parametrize("name", AUDITED)
def test_every_attack_that_check_lists_as_running_runs(name: str) -> None:
    """Not only those of a default audit. The exact searches take minutes on images, and are in the test below."""
    model, training = victim(name), gl.LocalTraining(lr=0.1)
    checked = preflight(model.task)
    running = [line.attack for line in checked.lines if line.status == RUNS and line.attack not in SLOW]
    alone = [attack for attack in running if gl.attacks.get(attack).most(model.task) == 1]
    assert running
    run_all(model, [attack for attack in running if attack not in alone], checked, training)
    run_all(model, alone, checked, training, examples=1)


SLOW = ("auto", "second-order", "ratio-second-order")


@pytest.mark.slow
@pytest.mark.parametrize("attack", SLOW)
@pytest.mark.parametrize("name", ["unet-segmentation", "series-lstm", "table-categories", "two-inputs"])
def test_exact_searches_run_too(name: str, attack: str) -> None:
    model = victim(name)
    examples = 2 if name == "two-inputs" else 1  # for time
    run_all(model, [attack], preflight(model.task), gl.LocalTraining(lr=0.1), examples)


def run_all(model: Victim, names: list[str], checked: Preflight, training: gl.LocalTraining, examples: int = 2) -> None:
    task = model.task
    batch = examples_of(model.data, task).batch(torch.arange(examples))  # one alone hides what couples them
    seen = gl.observe(task, batch, training)
    given = {name: batch[name][None] for name, field in task.fields.items() if field.public}
    engine = gl.Engine(device="cpu", batched=checked.examination.batched)
    for name in names:
        attack = gl.registry.parse("attack", quick(name))
        result = attack.run(task, seen, gl.Knowledge(training=training, given=given), engine=engine)
        assert result.target(0)["x"].shape[1:] == task.fields["x"].shape, name
        assert str(result.checks), name


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's modules do not stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("gradleak_user_")]:
        del sys.modules[name]


def command(*words: str) -> tuple[int, str]:
    """Exit code and output; what would be reported as a defect of gradleak (code 70) is raised."""
    answer = CliRunner().invoke(app, list(words))
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert "Traceback" not in answer.output
    return answer.exit_code, answer.output


def plain(text: str) -> str:
    """Text without the frames and line breaks of a terminal."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


@pytest.mark.parametrize("name", ZOO)
def test_the_command_line_agrees_with_itself(name: str, tmp_path: Path) -> None:
    victim(name)  # skips where a package is missing
    Path("model.py").write_text(FILE.format(name=name))
    checked, lines = command("check", "model.py:task", "--data", "model.py:data")
    audited, printed = command(
        "audit", "model.py:task", "--data", "model.py:data", "--quick", "--lr", "0.1", "--device", "cpu", "-o", "run"
    )
    assert (checked, audited) == ((1, 2) if name in REFUSED else (0, 0)), f"{lines}\n{printed}"
    if name in REFUSED:
        assert REFUSED[name] in plain(lines)
        assert "unsupported: " in printed
        assert REFUSED[name] in plain(printed)
        assert not Path("run").exists()  # refused before any work
        return
    result = gl.AuditResult.load("run")
    assert result.complete
    assert not result.failed
    assert result.verdict.word in (*WORDS, VOID)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_a_model_that_takes_no_single_example_is_audited_with_two() -> None:
    """Its positive control has two examples too."""
    model = victim("batch-norm-of-one")
    clients = gl.Federation(examples=2, training=gl.LocalTraining(lr=0.1))
    audit = gl.Audit(model.task, model.data, ["ig:steps=2"], targets=1, unrelated=1, federation=clients)
    result = audit.run()
    assert not result.failed
    assert "on updates of 2 undefended examples" in result.positive_control.text
