"""The command line: what it prints, refuses and returns. `python tests/test_cli.py` writes docs/cli.md."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer
import typer.main
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import gradleak as gl
from gradleak.cli import app, loading, progress, references, root
from gradleak.cli.audit import AuditOptions
from gradleak.cli.planning import plan_audit
from gradleak.core import listeners as watching
from gradleak.core.configuration import from_toml
from gradleak.core.durations import duration
from gradleak.report.terminal import fitted
from gradleak.report.threshold import crossed
from gradleak.scenario.kinds import Image

ROOT = Path(__file__).parents[1]
USER_FILE = """
import torch
import gradleak as gl

model = gl.models.lenet_zhu(shape=(3, 8, 8), classes=4, generator=torch.Generator().manual_seed(0))
like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=like)

def late():
    return task

def broken():
    raise KeyError("no such layer")

number = 3
generator = torch.Generator().manual_seed(1)
images = gl.data.Images(torch.rand(24, 3, 8, 8, generator=generator), torch.arange(24) % 4, 4, tuple("abcd"), "made up")
audit = gl.Audit(task, images, ["ig:steps=3"], targets=2)
"""


class Answer:
    """What a command printed and returned."""

    def __init__(self, *words: object) -> None:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception  # what gradleak.cli.main would report as a defect
        self.code, self.out, self.errors = result.exit_code, result.stdout, result.stderr

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.errors}"


def refused(*words: object) -> str:
    """Expect exit code 2 and one message without a traceback; returns it, with its whitespace made plain."""
    answer = Answer(*words)
    assert answer.code == 2, answer
    assert "Traceback" not in answer.errors, answer
    assert answer.errors.strip(), answer
    return re.sub(r"[\s│]+", " ", answer.errors)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test in a folder with a user's file; the user's modules do not stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADLEAK_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "train.py").write_text(USER_FILE)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("gradleak_user_")]:
        del sys.modules[name]


@pytest.fixture
def observation(tmp_path: Path) -> Path:
    """An observation of the user's model, in a file."""
    task = loading.task("train.py")
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return gl.observe(task, {"x": x, "y": torch.tensor([2])}, gl.LocalTraining(lr=0.1)).save(
        tmp_path / "seen.safetensors"
    )


# --- the outside -----------------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert Answer("--version").out == f"gradleak {gl.__version__}\n"
    assert Answer("--help").code == 0
    assert "audit" in Answer("--help").out


HEAVY = ("torch", "numpy", "scipy", "rich", "jinja2", "PIL")
LOADED = f"""
import sys
sys.argv = ["gradleak", *sys.argv[1:]]
from gradleak.cli import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def started(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, so that nothing is loaded yet."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["list", "--help"], ["audit", "--help"], ["data", "--help"]]
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    answer = started("-c", LOADED, *words)
    assert answer.stdout
    assert answer.stderr.splitlines()[-1] == "[]", answer.stderr


def test_completion_in_a_shell_knows_commands_and_kinds_and_loads_nothing_heavy() -> None:
    words = {"gradleak a": ["audit", "attack", "analyse"], "gradleak list at": ["attacks"], "gradleak data ": ["get"]}
    for typed, wanted in words.items():
        place = str(len(typed.split(" ")) - 1)
        more = {"_GRADLEAK_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": place}
        answer = started("-c", LOADED, **more)
        assert set(wanted) <= set(answer.stdout.split()), answer
        assert answer.stderr.splitlines()[-1] == "[]", answer.stderr


def test_help_takes_a_few_times_a_bare_interpreter() -> None:
    """With typer loaded, and measured beside it, so that a busy machine slows both; to import torch takes ten times."""

    def seconds(*words: str) -> float:
        began = time.perf_counter()
        assert started(*words).returncode == 0
        return time.perf_counter() - began

    command = "from gradleak.cli import main; main()"
    pairs = [(seconds("-c", command, "--help"), seconds("-c", "import typer")) for _ in range(4)]
    assert min(help_seconds for help_seconds, _ in pairs) < 4 * min(typer for _, typer in pairs), pairs


def test_the_stub_tells_what_there_is() -> None:
    """Type checkers and editors read __init__.pyi; at run time names are looked up in __init__.py."""
    stub = ast.parse((ROOT / "src/gradleak/__init__.pyi").read_text())
    names = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == sorted(gl.__all__) == dir(gl)
    homes = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name in gl.__all__:
        module = importlib.import_module(f"{homes[name]}" if homes[name] != "gradleak" else f"gradleak.{name}")
        assert getattr(gl, name) is (module if homes[name] == "gradleak" else getattr(module, name)), name
    assert gl.engine.Engine is gl.Engine, "modules that are not listed are found all the same"
    with pytest.raises(AttributeError, match="no attribute 'Autid'"):
        gl.Autid  # noqa: B018


def test_options_can_be_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADLEAK_LIST_PATTERN", "ig*")  # of an argument: not taken
    monkeypatch.setenv("GRADLEAK_CHECK_DATA", "digits")
    assert "the task wants (3, 8, 8)" in refused("check", "train.py")
    assert "GRADLEAK_CHECK_DATA" not in Answer("check", "--help").out, "the manual says once how they are called"
    monkeypatch.setenv("GRADLEAK_VERSION", "0.1.0")  # as a build may well have it
    monkeypatch.setenv("GRADLEAK_AUDIT_TARGETS", "0")
    assert "x>=1" in refused("audit")


def test_near_misses_are_named_once() -> None:
    message = refused("audti")
    assert message.count("Did you mean") == 1
    assert "'audit'" in message
    assert "--targets" in refused("audit", "--targts", "3")
    assert "Try 'gradleak audit --help'" in refused("audit", "--targts", "3")


def test_help_says_what_arguments_are() -> None:
    assert re.search(r"RUN +Folder of another\.", Answer("compare", "--help").out)
    assert Answer("compare", "--help").out.count("Folder of another.") == 1


def test_a_defect_keeps_its_traceback_and_its_own_exit_code() -> None:
    code = (
        "import sys, gradleak.cli, gradleak.data\n"
        "def broken(): raise ZeroDivisionError('ours')\n"
        "gradleak.data.available = broken\n"
        "sys.argv = ['gradleak', 'data', 'list']\n"
        "gradleak.cli.main()"
    )
    answer = started("-c", code)
    assert answer.returncode == 70
    assert "ZeroDivisionError: ours" in answer.stderr
    assert "defect of gradleak" in answer.stderr


@pytest.mark.parametrize(
    "words", [["audti"], ["list", "attcks"], ["audit", "--targets", "0"], ["attack"], ["data", "gte"]]
)
def test_words_that_nobody_knows(words: list[str]) -> None:
    refused(*words)


# --- options as objects ----------------------------------------------------------------------------------------------


# --- list, data, check -----------------------------------------------------------------------------------------------


def test_list_shows_paper_status_and_settings() -> None:
    out = Answer("list", "attacks", "ig*").out
    assert "ig  [verified]" in out
    assert "ig-modern  [unverified]" in out
    assert "Geiping" in out
    assert "steps=4800" in out
    assert "dlg" not in out
    assert "lenet-zhu  [verified]" in Answer("list", "models").out
    assert "auto" in Answer("list", "labels").out
    defences = Answer("list", "defences").out
    assert "    sits in: upload, server" in defences
    assert "in one round: no formal guarantee (small entries are dropped" in defences
    assert "(central model, against other clients and whoever sees the model); does not protect against" in defences
    assert re.search(r"^iid\n {4}Shuffle", Answer("list", "partitions").out, re.MULTILINE), "no figures to verify"
    assert "number=None" in Answer("list", "participation", "fixed").out
    assert "attacks:" in Answer("list").out
    assert "No attacks match 'zzz'" in Answer("list", "attacks", "zzz").out
    assert "Did you mean 'attacks'" in refused("list", "atacks")


def test_data_is_listed_with_its_terms() -> None:
    for answer in (Answer("list", "data"), Answer("data", "list")):
        assert "cifar10-samples  [present]" in answer.out
        assert "terms: " in answer.out
    assert "cannot be fetched. Did you mean 'cifar10'?" in refused("data", "get", "cifar")


def test_data_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes(b"")
    assert str(tmp_path / "mnist.npz") in Answer("data", "get", "mnist", "--into", tmp_path).out


def test_check_lists_problems_with_fixes_and_fails_on_errors() -> None:
    good = Answer("check", "train.py:task")
    assert good.code == 0, good
    Path("bad.py").write_text(
        USER_FILE.replace(
            "task = gl", "model = torch.nn.Sequential(model, torch.nn.Dropout(0.5))\nmodel.train()\ntask = gl"
        )
    )
    bad = Answer("check", "bad.py")
    assert "->" in bad.out
    assert not re.search(r"\b1 (findings|errors)", bad.out), bad
    assert (bad.code == 1) == ("error" in bad.out)


def test_check_counts_what_layers_tell() -> None:
    text = "import torch, gradleak as gl\nlike = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))\n"
    text += "model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(12)])\n"
    Path("deep.py").write_text(
        text + "task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=like)\n"
    )
    few, every = Answer("check", "deep.py:task").out, Answer("check", "deep.py:task", "--layers").out
    assert "Spans: up to 4 vectors in an update are told by 12 layers (0, 1, 2, 3, ...)." in few
    assert "and 4 more layers (--layers)" in few
    assert few.index("Spans:") < few.index("runs (")
    assert re.search(r"^11 +1 +4 +4 +4 +up to 4$", every, re.MULTILINE), every
    assert "--layers" not in every


def test_check_looks_at_the_data_too() -> None:
    assert Answer("check", "train.py:task", "--data", "train.py:images").code == 0
    Path("raw.py").write_text(
        USER_FILE + "x = torch.arange(24 * 192.).reshape(24, 3, 8, 8) % 256\npair = (x, images.y)\n"
    )
    assert "looks like 0-255 data" in Answer("check", "raw.py:task", "--data", "raw.py:pair").out
    assert "shape (1, 8, 8); the task wants (3, 8, 8)" in refused("check", "train.py", "--data", "digits")


# --- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py:task", "There is no file nowhere.py"),
        ("train.py:tsk", "Did you mean 'task'"),
        ("train.py:number", "is a int, not a gradleak.Task"),
        ("train.py:model", "not a gradleak.Task"),
        ("train.py:broken", "raised KeyError: 'no such layer'"),
        ("no_such_module_here:task", "There is no module 'no_such_module_here'"),
        ("what ever", "names neither a file nor a module"),
    ],
)
def test_references_that_lead_nowhere(reference: str, message: str) -> None:
    assert message in refused("check", reference)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise RuntimeError('stop')\n", "user.py, line 2 raised RuntimeError: stop"),
        ("x = (\n", "line 1 raised SyntaxError"),
        ("import no_such_package_at_all\n", "line 1 raised ModuleNotFoundError"),
        ("import sys\nsys.exit(0)\n", "line 2 raised SystemExit"),
    ],
)
def test_a_users_file_that_fails_is_one_message(text: str, message: str) -> None:
    Path("user.py").write_text(text)
    assert message in refused("check", "user.py:task")


def test_a_users_file_may_import_its_neighbours_and_build_late() -> None:
    Path("neighbour.py").write_text("from train import late\n")
    assert isinstance(loading.task("neighbour.py:late"), gl.Task)
    assert isinstance(loading.task("train.py"), gl.Task)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADLEAK_DEBUG", "1")
    answer = Answer("check", "train.py:broken")
    assert answer.code == 2
    assert "Traceback" in answer.errors


# --- words to objects ------------------------------------------------------------------------------------------------


def test_commas_separate_methods_and_settings() -> None:
    assert loading.methods(["ig,dlg:steps=10,history=5", " gi "]) == ("ig", "dlg:steps=10,history=5", "gi")
    assert loading.methods(["a:shape=(1,2),x=3,b"]) == ("a:shape=(1,2),x=3", "b")
    assert loading.methods([]) == ()
    with pytest.raises(gl.registry.BadSetting, match="setting without a method"):
        loading.methods(["steps=3"])


def test_numbers() -> None:
    assert loading.numbers("0,50", "--rounds") == (0, 50)
    assert loading.numbers("0-3,2", "--seeds") == (0, 1, 2, 3)
    assert loading.numbers("5,5", "--labels", unique=False) == (5, 5)
    for bad in ("x", "1-", ",", "1.5"):
        with pytest.raises(root.LoadError, match="--rounds"):
            loading.numbers(bad, "--rounds")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("train.py", True),
        ("train.py:data", True),
        ("pack.module:data", True),
        ("cifar10", False),
        ("a/b.npz", False),
        ("C:x/y", False),
    ],
)
def test_data_may_be_a_reference(text: str, is_one: bool) -> None:
    assert references.is_reference(text) is is_one


def test_one_core_is_left_to_others_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.getloadavg", lambda: (1.2, 0.0, 0.0))
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    root.spare_a_core()
    assert asked == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    root.spare_a_core()
    assert asked == [3]
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 2.0, 2.0))
    root.spare_a_core()
    assert asked == [3]


# --- attack ----------------------------------------------------------------------------------------------------------


def test_attack_writes_pictures_and_tensors_without_any_truth(observation: Path) -> None:
    answer = Answer(
        "attack", observation, "--task", "train.py:task", "--attack", "ig:steps=4,restarts=2", "-o", "found"
    )
    assert answer.code == 0, answer
    for word in ("objective", "match", "y: 2", "of 2, chosen by match", "checks", "found/reconstruction.png"):
        assert word in answer.out, word
    tensors = load_file("found/reconstruction.safetensors")
    assert tensors["x"].shape == (1, 1, 3, 8, 8)
    assert Path("found/reconstruction.png").read_bytes().startswith(b"\x89PNG")


def test_attack_takes_the_recipe_and_the_labels(observation: Path) -> None:
    words = ("attack", observation, "--task", "train.py", "--attack", "dlg:steps=3", "--labels", "2")
    assert "--lr" in refused(*words)
    assert Answer(*words, "--lr", "0.1", "--steps", "1").code == 0
    assert "needs --lr" in refused(*words, "--epochs", "2")
    unrelated = refused(*words[:-1], "1,2,3", "--lr", "0.1")
    assert "shape" in unrelated
    assert "On the command line" not in unrelated


def test_rounds_of_one_client_are_one_target(observation: Path) -> None:
    first = gl.Observation.load(observation)
    replace(first, round=first.round + 1).save("again.safetensors")
    words = (
        "attack",
        "again.safetensors",
        observation,
        "--task",
        "train.py:task",
        "--attack",
        "ig:steps=3",
        "-o",
        "found",
    )
    answer = Answer(*words, "--track")  # in any order
    assert answer.code == 0, answer
    assert load_file("found/reconstruction.safetensors")["x"].shape[0] == 1
    first.save("same.safetensors")
    assert "rounds must increase" in refused("attack", "same.safetensors", *words[2:], "--track")


def test_files_with_one_key_are_told_apart_by_their_names(observation: Path) -> None:
    folder = observation.with_name("other")
    folder.mkdir()
    copies = [observation, observation.with_name("b.safetensors"), folder / "b.safetensors"]
    for copy in copies[1:]:
        copy.write_bytes(observation.read_bytes())
    answer = Answer("attack", *copies, "--task", "train.py", "--attack", "ig:steps=2")
    assert answer.code == 0, answer
    assert re.findall(r"^(\S+): objective", answer.out, re.MULTILINE) == ["seen", "b", "b-2"]


def test_odd_updates_are_told_before_the_attack(observation: Path) -> None:
    good = gl.Observation.load(observation)
    zero = {name: torch.zeros_like(value) for name, value in good.update.items()}
    path = gl.Observation(good.weights, zero, 1).save("zero.safetensors")
    answer = Answer("attack", path, "--task", "train.py", "--attack", "ig:steps=2", "--labels", "1")
    assert answer.out.startswith("target: error: the update is zero everywhere"), answer
    assert "checks: checks" not in answer.out


VALUE = """
class Valued(torch.nn.Module):
    def forward(self, x):
        return x * (1.0 if float(x.detach().mean()) > -9 else 2.0)

task = gl.Task.supervised(torch.nn.Sequential(Valued(), model), torch.nn.functional.cross_entropy, like=like)
"""


def test_models_that_vmap_rejects_run_one_by_one() -> None:
    Path("valued.py").write_text(USER_FILE + VALUE)
    task = loading.task("valued.py")
    path = gl.observe(task, {"x": torch.rand(1, 3, 8, 8), "y": torch.tensor([2])}, gl.LocalTraining(lr=0.1)).save("v")
    words = ("attack", path, "--task", "valued.py", "--attack", "ig:steps=2")
    assert "On the command line: --one-by-one" in refused(*words)
    assert Answer(*words, "--one-by-one").code == 0
    audit = ("audit", "valued.py:task", "--data", "valued.py:images", "--attack", "ig", "--quick", "-o")
    answer = Answer(*audit, "lanes")  # an audit has examined the model, and does it by itself
    assert answer.code == 0, answer
    assert not gl.AuditResult.load("lanes").failed
    answer = Answer(*audit, "single", "--one-by-one")
    assert answer.code == 0, answer
    assert loading_toml("single/run.toml")["engine"]["batched"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attack", "igg"), "Did you mean 'ig'"),
        (("--attack", "ig:stps=3"), "has no setting 'stps'. Did you mean 'steps'"),
        (("--attack", "ig:steps"), "is not a setting"),
        (("--attack", "ig:steps=abc"), "attack 'ig': steps must be a whole number; given 'abc'."),
        (("--attack", "ig:steps=0"), "steps must be"),
        (("--labels", "77"), "77"),
        (("--attack", "ig:restarts=0"), "restarts must be at least 1"),
        (("--defence", "fedsma"), "Unknown defence 'fedsma'. Did you mean "),
        (("--precision", "half"), "precision must be"),
        (("--device", "cuda:99"), ". Try --device cpu."),
        (("--device", "nonsense"), "cannot be used"),
        (("--labels", "cat"), "--labels must be whole numbers"),
    ],
)
def test_attack_refuses_what_does_not_exist(observation: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused("attack", observation, "--task", "train.py", *words)


def damaged(kind: str, good: Path) -> Path:
    """A file that is no observation, in one of the ways in which files go wrong or are made to."""
    bad, content, tensors = good.with_name("bad.safetensors"), good.read_bytes(), load_file(good)
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    metadata = header["__metadata__"]
    if kind == "missing":
        return good.with_name("missing.safetensors")
    if kind in ("empty", "cut off", "not safetensors", "huge header"):
        texts = {
            "empty": b"",
            "cut off": content[: len(content) // 2],
            "not safetensors": b"import os; os.system('x')" * 9,
        }
        bad.write_bytes({**texts, "huge header": struct.pack("<Q", 2**60) + content[8:]}[kind])
        return bad
    first = next(name for name in tensors if name.startswith("update/"))
    if kind == "nan":
        tensors[first] = tensors[first] * torch.nan
    if kind == "wrong shape":
        tensors[first] = tensors[first].flatten()[:1]
    if kind == "another model":
        tensors = {name.replace("classifier", "head"): value for name, value in tensors.items()}
    if kind == "stray tensor":
        tensors["../../etc/passwd"] = torch.zeros(1)
    if kind == "not an observation":
        metadata = {}
    if kind == "future version":
        metadata = {**metadata, "version": "99"}
    if kind == "hostile header":
        metadata = {**metadata, "observation": json.dumps({"num_examples": 1, "__class__": "os.system"})}
    if kind == "deep header":
        metadata = {**metadata, "observation": "[" * 100_000}
    if kind == "million examples":
        metadata = {**metadata, "observation": json.dumps({"num_examples": "1000000"})}
    save_file(tensors, bad, metadata)
    return bad


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "There is no file"),
        ("empty", "not a readable observation"),
        ("cut off", "not a readable observation"),
        ("not safetensors", "not a readable observation"),
        ("huge header", "not a readable observation"),
        ("nan", "NaN or infinity"),
        ("wrong shape", "has shape"),
        ("another model", "is not of this model"),
        ("stray tensor", "belongs to none of"),
        ("not an observation", "not an observation"),
        ("future version", "has version '99'"),
        ("hostile header", "unknown entries '__class__'"),
        ("deep header", "not a readable observation"),
        ("million examples", "num_examples must be a whole number"),
    ],
)
def test_files_from_outside_are_refused_with_one_message(observation: Path, kind: str, message: str) -> None:
    assert message in refused("attack", damaged(kind, observation), "--task", "train.py", "--attack", "ig:steps=2")
    assert not Path("runs").exists()


def test_ctrl_c_says_what_is_kept(observation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gl.Composed, "run", interrupted)
    answer = Answer("attack", observation, "--task", "train.py")
    assert answer.code == 130
    assert "nothing was written" in answer.errors


# --- audit -----------------------------------------------------------------------------------------------------------

TINY = ("audit", "train.py:task", "--data", "train.py:images", "--attack", "ig:steps=3", "--targets", 2, "--lr", 0.1)


def test_an_audit_of_a_users_file_from_start_to_report() -> None:
    answer = Answer(*TINY, "-o", "run")
    assert answer.code == 0, answer
    tree = answer.errors.split("[1/1]")[0].splitlines()
    assert tree[0] == "Audit"
    assert [re.match(r"[ |`]+- (\S+)", line)[1] for line in tree[1:]] == [  # type: ignore[index]
        *("threat", "federation", "grid", "attacks", "defences", "rounds", "seeds", "targets", "into", "cost")
    ]
    assert "level C (training details); knows model, loss, number of examples, recipe; not data, labels" in tree[1]
    assert "1 client, 1 example of each in a round; 1 local step, SGD, learning rate 0.1" in tree[2]
    assert re.search(r"cost +1 cell, 4 reconstructions, 12 lane steps: about ", tree[-1])
    assert "[1/1] ig:steps=3" in answer.errors
    assert re.search(r"^ig:steps=3 +none", answer.out, re.MULTILINE)
    assert "Report: run/report.html" in answer.out
    assert "<!doctype html>" in Path("run/report.html").read_text()
    settings = loading_toml("run/run.toml")
    assert settings["origin"] == {"task": "train.py:task", "data": "train.py:images"}
    assert settings["federation"]["training"]["lr"] == 0.1

    assert "kept from before" in Answer(*TINY, "-o", "run").errors  # the same command resumes
    assert "holds a run with other settings" in refused(*TINY, "--seeds", "0-1", "-o", "run")


def test_defences_are_audited_by_every_attacker_and_labelled() -> None:
    chosen = "none,pruning,clipping,local-gaussian,dp-fedavg"
    answer = Answer(*TINY, "--quick", "--defence", chosen, "-o", "run")
    assert answer.code == 0, answer
    assert re.search(
        r"^defence +undefended +A0 naive +A1 masked +A2 adaptive +A2, rounds averaged +no gradient +verdict$",
        answer.out,
        re.M,
    )
    for name in chosen.split(",")[1:]:
        assert re.search(rf"^{name} .*\*", answer.out, re.MULTILINE), name
        assert re.search(rf"^- {name}: ", answer.out, re.MULTILINE), name
    assert "- pruning: no formal guarantee (" in answer.out
    assert answer.out.count("differential privacy of one client") == 2
    page = Path("run/report.html").read_text()
    assert "does not protect against the aggregating server (the GIA adversary)" in page
    assert Answer("report", "run").code == 0


def loading_toml(path: str) -> dict[str, Any]:
    return from_toml(Path(path).read_text())


def test_a_run_is_repeated_from_its_file_reported_and_compared() -> None:
    Answer(*TINY, "-o", "one")
    again = Answer("audit", "--config", "one/run.toml", "-o", "two")
    assert again.code == 0, again
    first, second = (json.loads(Path(run, "rows.jsonl").read_text().splitlines()[0]) for run in ("one", "two"))
    assert first["scores"] == second["scores"]
    assert first["cell"] == second["cell"]
    assert "ig:steps=3" in Answer("compare", "one", "two").out
    assert Answer("report", "one", "-o", "other.html").out.strip() == "other.html"
    assert Path("other.html").exists()
    assert Answer("audit", "--config", "one/run.toml").errors.count("dB, kept from before") == 1  # into its own folder


def test_folders_are_found_again_and_never_mixed() -> None:
    assert "Report: runs/train/report.html" in Answer(*TINY).out
    assert "Report: runs/train-2/report.html" in Answer(*TINY, "--seeds", "1").out
    assert "kept from before" in Answer(*TINY, "--seeds", "1").errors


def test_quick_runs_everything_of_a_users_audit() -> None:
    answer = Answer("audit", "train.py:audit", "--attack", "dlg:steps=900", "--quick")
    assert answer.code == 0, answer
    assert "Report: runs/train-quick/report.html" in answer.out
    assert "dlg:steps=2" in answer.out
    assert "Quick run: shows that everything runs, nothing else." in answer.out
    assert loading_toml("runs/train-quick/run.toml")["trial"] is True


def test_a_model_by_name_for_any_images() -> None:
    answer = Answer("audit", "mlp", "--data", "digits", "--attack", "ig", "--quick", "-o", "run")
    assert answer.code == 0, answer
    assert Answer("audit", "--config", "run/run.toml", "-o", "again").code == 0
    assert "Say which data lenet5 is trained on" in refused("audit", "lenet5")
    assert "Did you mean 'lenet5'" in refused("audit", "lennet5", "--data", "digits")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py:task",), "holds no data. Say which examples"),
        (("train.py:task", "--data", "nowhere"), "Unknown data 'nowhere'"),
        (("train.py:task", "--data", "no/such/folder"), "There is no file or folder"),
        (("train.py:task", "--data", "train.py:number"), "data is int"),
        (("train.py:task", "--data", "digits"), "shape (1, 8, 8); the task wants (3, 8, 8)"),
        (("train.py:audit", "--attack", "igg"), "Did you mean 'ig'"),
        (("train.py:audit", "--attack", "ig:stps=1"), "Did you mean 'steps'"),
        (("train.py:audit", "--defence", "prunning"), "Did you mean 'pruning'"),
        (("train.py:audit", "--defence", "none,pruning:keep=2"), "defence 'pruning': keep is the share"),
        (("train.py:audit", "--defence", "pruning:kep=1"), "Did you mean 'keep'"),
        (("train.py:audit", "--defence", "agp"), "agp cannot be used here. AGP finds no convolution named 'conv2'"),
        (("train.py:audit", "--defence", "clipping + nothing"), "Unknown defence 'nothing'"),
        (("train.py:audit", "--targets", "500"), "fewer targets"),
        (("train.py:audit", "--examples", "500"), "examples"),
        (("train.py:audit", "--rounds", "soon"), "--rounds must be whole numbers"),
        (("train.py:audit", "--lr", "0"), "lr must be positive"),
        (("train.py:audit", "--lr", "1", "--steps", "2", "--epochs", "2"), "steps or epochs, not both"),
        (("train.py:audit", "--precision", "half"), "precision must be"),
        (("train.py:audit", "--device", "cuda:99"), "cannot be used"),
        (("train.py:audit", "--junit", "nowhere/tests.xml"), "there is no folder nowhere to write it into"),
        (("--config", "no.toml"), "no.toml: No such file"),
        (("--config", "train.py"), "is not TOML"),
        (("--config", "empty.toml"), "does not say where its task is found"),
        (("--config", "odd.toml"), "odd.toml is not the configuration of an audit"),
    ],
)
def test_audits_that_cannot_run(words: tuple[str, ...], message: str) -> None:
    Path("empty.toml").write_text("")
    Path("odd.toml").write_text(
        'attacks = ["ig"]\n[origin]\ntask = "train.py:task"\ndata = "train.py:images"\n[engine]\nwarp = 9\n'
    )
    assert message in refused("audit", *words)


@pytest.mark.parametrize("command", [("report", "."), ("compare", ".", "."), ("report", "nowhere")])
def test_folders_that_are_no_runs(command: tuple[str, ...]) -> None:
    assert "run.toml" in refused(*command)


def test_a_damaged_run_is_one_message() -> None:
    Answer(*TINY, "-o", "run")
    rows = Path("run/rows.jsonl")
    for text in ("not json\n", "[]\n", '{"version": 99}\n', '{"version": 1, "cell": "../../x", "status": "done"}\n'):
        rows.write_text(text)
        assert "rows.jsonl:1" in refused("report", "run")


def test_ctrl_c_in_an_audit_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradleak.cli.sys.argv", ["gradleak", "audit", "train.py:audit"])
    monkeypatch.setattr("gradleak.audit.estimate", lambda audit, out=None: "soon")  # it runs the attack too
    monkeypatch.setattr(gl.Composed, "run", interrupted)
    answer = Answer("audit", "train.py:audit")
    assert answer.code == 130
    assert "0 of 1 cells are kept in runs/train" in answer.errors
    assert "Go on with: gradleak audit train.py:audit" in answer.errors


def test_a_run_in_which_every_cell_failed_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("somewhere")

    monkeypatch.setattr("gradleak.audit.estimate", lambda audit, out=None: "soon")
    monkeypatch.setattr(gl.Composed, "run", failing)
    assert "every cell failed, the first with: ZeroDivisionError: somewhere" in refused("audit", "train.py:audit")


def test_quick_shortens_attacks_that_were_made_in_python() -> None:
    made = "attacks = [gl.attacks.get('ig', steps=5000), gl.attacks.get('second-order')]\n"
    Path("made.py").write_text(USER_FILE + made + "audit = gl.Audit(task, images, attacks, targets=2)\n")
    planned = plan_audit(AuditOptions(reference="made.py:audit", quick=True))
    assert [attack.stages[0].optimiser.steps for attack in planned.attacks[:1]] == [2]
    assert planned.attacks[1].steps == 2
    assert planned.trial


def test_junit_beside_a_run() -> None:
    """The threshold is not crossed, but the control failed: the run is void, exits with 1, and its case fails."""
    answer = Answer(*TINY, "--fail-above", "0.99", "--junit", "tests.xml", "-o", "run")
    assert answer.code == 1, answer
    suite = ElementTree.parse("tests.xml").getroot()[0]
    assert suite.get("tests") == "2"
    assert suite.get("failures") == "1"
    failure = suite[-1].find("failure")
    assert failure is not None
    assert "the run is void" in failure.get("message", "")


def test_plain_is_what_a_pipe_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_plain", lambda stream: False)  # as on a terminal
    assert "[1/1] ig:steps=3" in Answer(*TINY, "--plain", "-o", "one").errors
    monkeypatch.setenv("GRADLEAK_PLAIN", "1")
    assert "[1/1] ig:steps=3" in Answer(*TINY, "-o", "two").errors


def test_a_comparison_can_fail() -> None:
    Answer(*TINY, "-o", "one")
    Answer(*TINY, "--seeds", "1", "-o", "two")
    same = Answer("compare", "one", "two", "--fail-on", "changed")
    assert same.code == 0, same
    assert "the same examples, target by target" in same.out
    Answer(*TINY, "--defence", "pruning", "-o", "other")
    assert Answer("compare", "one", "other").code == 0
    changed = Answer("compare", "one", "other", "--fail-on", "changed")
    assert changed.code == 1, changed
    assert "only in the first run" in changed.errors
    assert Answer("compare", "one", "other", "--fail-on", "worse").code == 0, "a line that is gone leaks nothing"
    assert Answer("compare", "one", "two", "--format", "latex").out.count(r"\toprule") == 1
    assert "Beside it: Did you mean 'one'?" in refused("report", "onee")


def test_the_gate_for_continuous_integration() -> None:
    """Three steps recover nothing, so the control fails; a void run must not pass a gate."""
    answer = Answer(*TINY, "--fail-above", "0.99", "-o", "run")
    assert answer.code == 1, answer
    assert "the run is void" in answer.errors
    assert Path("run/report.html").exists()


@pytest.mark.parametrize(
    ("word", "shares", "message"),
    [
        ("leaks", [0.5, 0.2], "recovered 50%"),
        ("leaks in part", [0.1], ""),
        ("not shown to leak", [0.0], ""),
        ("void", [0.0], "void"),
        ("inconclusive", [0.0], "inconclusive"),
        ("leaks", [float("nan")], "no line"),
    ],
)
def test_thresholds(word: str, shares: list[float], message: str) -> None:
    lines = [
        SimpleNamespace(
            attack="ig", defence="none", form="undefended", recovered=SimpleNamespace(value=share), kind=Image()
        )
        for share in shares
    ]
    result: Any = SimpleNamespace(verdict=SimpleNamespace(word=word), summaries=lines)
    reason = crossed(result, 0.2)
    assert message in reason
    assert bool(reason) == bool(message)


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    Answer(*TINY, "-o", "run")
    result = gl.AuditResult.load("run")
    narrow = fitted(result, 80)
    assert max(map(len, narrow.splitlines()[:3])) <= 80
    assert "more columns" in narrow
    assert "verdict" in narrow
    assert fitted(result, None) == fitted(result, 500) == result.table()


def test_no_attacker_is_left_out_in_a_narrow_terminal() -> None:
    Answer(*TINY, "--quick", "--defence", "none,pruning", "-o", "run")
    result = gl.AuditResult.load("run")
    narrow = fitted(result, 80)
    line = " ".join(narrow.split("pruning: ")[1].split())
    for name in ("undefended", "A0 naive", "A1 masked", "A2 adaptive", "no gradient", "verdict"):
        assert name in line, name
    assert "no formal guarantee" in narrow
    assert fitted(result, 500).replace("\n", " ") == result.table().replace("\n", " ")


# --- train -----------------------------------------------------------------------------------------------------------

TRAIN = ("train", "train.py:task", "--data", "train.py:images", "--clients", 3, "--per-round", 2, "--epochs", 1)
TRAIN += ("--batch-size", 4)


def test_a_training_of_a_users_file_is_kept_and_goes_on() -> None:
    answer = Answer(*TRAIN, "--rounds", 3, "--checkpoints", "2", "-o", "run")
    assert answer.code == 0, answer
    assert re.search(r"3 rounds of about \d+ local steps: about .+ on ", answer.errors)
    assert re.search(r"^ +3 +[\d.]+ +[\d.]+ +[\d.]+% +2 +0$", answer.out, re.MULTILINE)
    assert "Attack it: gradleak audit --from run --rounds 0,2,3" in answer.out
    settings = loading_toml("run/training.toml")
    assert settings["origin"] == {"task": "train.py:task", "data": "train.py:images", "holdout": 0.1}
    assert settings["federation"]["participation"] == "fixed:number=2"
    assert sum(settings["partition"]["sizes"]) == 22  # 24 images less a tenth
    more = Answer(*TRAIN, "--rounds", 5, "--checkpoints", "2", "-o", "run")
    assert more.code == 0, more
    assert [json.loads(line)["round"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == list(range(6))
    assert "They differ in federation.server_lr (1.0 there, 0.5 now)" in refused(
        *TRAIN, "--rounds", 5, "--server-lr", 0.5, "-o", "run"
    )


def test_an_audit_attacks_the_checkpoints_of_a_training() -> None:
    Answer(*TRAIN, "--rounds", 3, "--checkpoints", "2", "-o", "trained")
    attacked = ("audit", "--from", "trained", "--attack", "ig:steps=2", "--targets", 1, "--rounds")
    answer = Answer(*attacked, "0,2", "-o", "run")
    assert answer.code == 0, answer
    rows = [json.loads(line) for line in Path("run/rows.jsonl").read_text().splitlines()]
    assert {row["round"] for row in rows if not row["control"]} == {0, 2}
    assert all(row["status"] == "done" for row in rows)
    assert re.search(
        r"^- round 2: test accuracy [\d.]+%, test loss [\d.]+ \(trained without a", answer.out, re.MULTILINE
    )
    assert 'id="utility"' in Path("run/report.html").read_text()
    settings = loading_toml("run/run.toml")
    assert settings["origin"] == {"task": "train.py:task", "data": "train.py:images", "trained": "trained"}
    assert settings["federation"]["clients"] == 3
    again = Answer("audit", "--config", "run/run.toml", "-o", "again")
    assert again.code == 0, again
    assert loading_toml("again/run.toml")["fingerprint"] == settings["fingerprint"]
    message = refused(*attacked, "1")
    assert "has no checkpoint of round 1; there are: 0, 2, 3." in message
    assert "leave --data out" in refused(*attacked, "0", "--data", "digits")
    assert "leave --clients out" in refused(*attacked, "0", "--clients", 2)
    assert "holds no training" in refused("audit", "--from", "run")
    assert "give one of them" in refused("audit", "--from", "trained", "--config", "run/run.toml")


def test_ctrl_c_in_a_training_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradleak.federation import Rounds

    after = Rounds.after

    def interrupted(self: Any, state: Any) -> Any:
        if state.round == 2:
            raise KeyboardInterrupt
        return after(self, state)

    monkeypatch.setattr("gradleak.cli.sys.argv", ["gradleak", "train", "train.py:task"])
    monkeypatch.setattr(Rounds, "after", interrupted)
    answer = Answer(*TRAIN, "--rounds", 4, "-o", "run")
    assert answer.code == 130, answer
    assert "2 of 4 rounds are kept in run" in answer.errors
    assert "Go on with: gradleak train train.py:task" in answer.errors
    monkeypatch.setattr(Rounds, "after", after)
    whole = Answer(*TRAIN, "--rounds", 4, "-o", "whole")
    assert Answer(*TRAIN, "--rounds", 4, "-o", "run").code == whole.code == 0
    first, second = (load_file(f"{run}/checkpoints/round-4.safetensors") for run in ("run", "whole"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_trainings_find_their_folders_and_never_mix() -> None:
    short = (*TRAIN, "--rounds", 1)
    assert "--from runs/train-train " in Answer(*short).out
    other = Answer(*short, "--seed", 1)
    assert "There is another training already; this one goes into runs/train-train-2." in other.errors
    assert "--from runs/train-train-2 " in other.out


def test_a_model_by_name_is_trained_and_tested_on_the_test_part() -> None:
    words = ("train", "mlp", "--data", "digits", "--test-data", "digits", "--rounds", 1, "--steps", 1, "-o", "run")
    answer = Answer(*words, "--partition", "dir_class:alpha=0.3", "--poisson", 0.9, "--lr", 0.01)
    assert answer.code == 0, answer
    settings = loading_toml("run/training.toml")
    assert sum(settings["partition"]["sizes"]) == 1438  # four fifths of 1,797
    assert settings["federation"]["split"] == "dir_class:alpha=0.3,min_size=10"
    assert settings["federation"]["participation"] == "poisson:rate=0.9"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py:task",), "Say which data train.py:task is trained on"),
        (("--per-round", 2, "--poisson", 0.5), "both say who takes part"),
        (("--holdout", 0.2, "--test-data", "digits"), "both say what is tested on"),
        (("--partition", "dirichlet"), "Unknown partition 'dirichlet'"),
        (("--clients", 3, "--per-round", 4), "4 clients per round cannot be chosen from 3"),
        (("--weighting", "size"), "'examples' or 'uniform'"),
        (("--rounds", 3, "--checkpoints", "5"), "Checkpoint 5 lies outside"),
        (("--steps", 2, "--epochs", 2), "steps or epochs, not both"),
    ],
)
def test_a_training_that_cannot_be(words: tuple[object, ...], message: str) -> None:
    assert message in refused("train", *words)


# --- progress --------------------------------------------------------------------------------------------------------


def test_plain_lines_count_cells_and_name_failures(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.display() as bars:  # pytest's stderr is no terminal
        bars.start(3)
        bars.finished("old", [{"status": "done", "scores": {"psnr": [20.0, None]}}])
        bars.cell("new", 1)
        bars.share(0.5)
        bars.finished("new", [{"status": "failed", "error": "ValueError: no"}])
        bars.note("by the way")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[1/3] old: 1 target, mean PSNR 20.0 dB, kept from before"
    assert lines[1].startswith("[2/3] new: FAILED (ValueError: no), in 0.0 s")
    assert lines[2] == "by the way"


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with progress.display() as bars:
        assert isinstance(bars, progress.Bars)
        bars.start(2)
        bars.cell("[bold]first[/bold]", 0)
        bars.share(0.25)
        bars.finished("[bold]first[/bold]", [])
    assert "[bold]first[/bold]: 0 targets" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    assert progress.is_plain(sys.stderr)


def test_an_objective_is_drawn_as_a_curve() -> None:
    curve = progress.Curve()
    assert str(curve) == ""
    for step in range(100):
        curve.add(10.0 ** -(step / 20))
    drawn, value = str(curve).split()
    assert len(drawn) == progress.WIDTH
    assert drawn[0] == "█"
    assert drawn[-1] == "▁"
    assert list(drawn) == sorted(drawn, reverse=True), "evenly falling on a log scale"
    assert value == "1.1e-05"
    flat = progress.Curve(progress.LETTERS)
    for value in (-1.0, -1.0):
        flat.add(value)
    assert str(flat) == "__ -1.0e+00"
    assert progress.bars_for(open(os.devnull, encoding="ascii")) == progress.LETTERS  # noqa: SIM115


def test_the_display_hears_the_objective(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    watching.tell(torch.ones(2))  # nobody listens
    with progress.display(plain=True) as bars:
        bars.start(1)
        bars.cell("only", 0)
        watching.tell(torch.tensor([torch.nan, 0.25, 0.25, 4.0]))
        bars.share(0.5)
        watching.tell(torch.tensor([torch.nan]))  # a search that diverged says nothing
    assert "[1/1] only: 50%, objective 2.5e-01, about " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- the manual ------------------------------------------------------------------------------------------------------

MANUAL = ROOT / "docs" / "cli.md"
FOREWORD = """# The command line

Written by `python tests/test_cli.py` from the commands' own help; a test checks that it is current.

| exit code | |
|---|---|
| 0 | done; where a threshold was stated, it was not crossed |
| 1 | a stated threshold was crossed: `audit --fail-above`, `compare --fail-on`, `reproduce --scale paper` |
| 1 | the answer is no: `check` found errors or no attack that can run, `gate` blocks, `prior check` found a target |
| 2 | it could not run: one message on standard error says why and what to do; also where every cell failed |
| 70 | a defect of gradleak, with its traceback |
| 130 | interrupted; the message says what is kept and how to go on |

Results go to standard output, everything else to standard error. On a terminal, long commands show bars with the time
left and the curve of the current objective; in a pipe, with `--plain`, `NO_COLOR=1` or `TERM=dumb`, plain lines.
`GRADLEAK_PLAIN=1` is `--plain` for all commands, `GRADLEAK_DEBUG=1` shows tracebacks. On a CPU, `audit`, `attack`,
`train` and `analyse` leave one core to other programs; `OMP_NUM_THREADS` sets the number of threads.

Every option can be set by an environment variable too: `GRADLEAK_AUDIT_TARGETS=4` is `--targets 4` of `audit`,
`GRADLEAK_PRIOR_TRAIN_BATCH_SIZE` that of `prior train`; several values of one option are separated by spaces.

`gradleak --install-completion` lets your shell complete commands and options.

In continuous integration: `gradleak audit ... --fail-above 0.1 --junit leakage.xml`. The JUnit file has a test case for
each cell (a failure where more is recovered than was allowed, an error where the cell failed, skipped where it is
inconclusive) and one for the run, which fails exactly where the exit code is 1.
"""


def manual() -> str:
    """Every command's help as plain text, 100 columns wide."""
    pages = [FOREWORD]

    def visit(command: Any, words: list[str]) -> None:
        context = command.make_context(" ".join(words), ["--help"], resilient_parsing=True)
        context.max_content_width = context.terminal_width = 100
        pages.append(f"## {' '.join(words)}\n\n```text\n{command.get_help(context).replace(chr(92) + '[', '[')}\n```\n")
        for name in getattr(command, "commands", {}):
            visit(command.commands[name], [*words, name])

    visit(typer.main.get_command(app), ["gradleak"])
    return "\n".join(pages)


def test_the_manual_is_current() -> None:
    pinned = re.search(r"^typer==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pinned is None or pinned[1] != typer.__version__:
        pytest.skip("another typer writes help in another way")
    assert MANUAL.read_text() == manual(), "write it anew: python tests/test_cli.py"


if __name__ == "__main__":
    MANUAL.write_text(manual())
