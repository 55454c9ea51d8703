"""Import paths and names of release 0.1: they warn at the caller's line and give the objects of today."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import pytest

import gradleak as gl
from gradleak import compat

# Every module of release 0.1 but those of the command line and of the benchmarks.
RELEASED = """
: accounting adapters analysis assignment attack attacks audit auto cascade checks convolution data defence defences
  diffusion distributed draws dropout engine environment federation flower gate generators gradcam guarantee inspection
  layers linear local metrics models observation parts recompute registry report results rules scene search secure study
  task tree watching
analysis: association ball channel gradcam hessian identifiability index information lanczos local point recipe risk
  rounding spectrum
attacks: analytic coarse_replay cpl dlfa dlg fedleak ggl gi gias gidm gifd idlg ig ig_tanh nl_sme representation
  second_order sign_matching sme span spectral
audit: ablation cells cost execution private probe recorded runfile
auto: again case members polish residual tuning
data: fetch leaf sources
defences: agp clipping dp_fedavg dp_lewis dp_sgd fedasam fedgf fedsai fedsam gaussian geyer ldp_secadam mixup noise pgd
  pruning random_mask secadam seclion soteria tip tip_dp_baseline withholding
diffusion: adapter objective sampler schedule shared
federation: checkpoints clients graphs participation partition rounds samples swa training uploads
flower: client gate grid privacy recording records secure server tap wrapped
generators: augmentation dcgan discriminators files game recipes score splits stages stylegan2 training
inspection: batch model objective subject
metrics: perceptual similarity
models: lenets modern pieces plain residual transformers unets
parts: blended chain checkpointed cma coarse cohorts epochs fields frozen krylov label_counts label_readings labels
  latent lbfgs levenberg llg matches optimisers partial peeling predictions priors projections quadratic residual
  sampled sign_labels smoothing spaces spans steps surrogates
report: certificate checks curves defences evidence frames gallery grid limits matrix page pictures reconstruction
  repeat rounds scores strip study terminal threat threshold
results: certificate code comparison configuration headline intervals junit labels ledger notebook resumable rows ruling
  schema scoring store summary tables verdict
secure: client errors messages plan primitives reveal ring risk seed server shamir simulation stages
study: folder leakage measure result
"""
MODULES = [
    f"{folder}.{name}".strip(".")
    for folder, _, names in (entry.partition(":") for entry in RELEASED.strip().replace("\n  ", " ").splitlines())
    for name in names.split()
]

# A line as users wrote it -> where its last name is now.
LINES = {
    "from gradleak.local import LocalTraining": "scenario.client.LocalTraining",
    "from gradleak.task import Task": "scenario.task.Task",
    "from gradleak.scene import Scene": "parts.view.TargetView",
    "from gradleak.scene import Now": "parts.view.Step",
    "from gradleak.attack import Stage": "parts.stage.Stage",
    "from gradleak.cascade import Waves": "attack.cascade.EscalatingRestarts",
    "from gradleak.parts.spaces import Together": "parts.spaces.JointSpace",
    "from gradleak.parts.surrogates import Sent": "parts.surrogates.GradientAtStart",
    "from gradleak.parts.coarse import Held": "parts.coarse.CoarseRule",
    "from gradleak.parts.coarse import Gathered": "parts.coarse.SpreadRule",
    "from gradleak.generators.game import Game": "priors.trainer.GANTrainer",
    "from gradleak.results import AuditResult": "audit.result.AuditResult",
    "from gradleak.results import BadRun": "core.files.BadRun",
    "from gradleak.analysis import certify": "identify.certificates.certify",
    "from gradleak.analysis import curvature": "curvature.hessian.curvature",
    "from gradleak.analysis.hessian import ggn": "curvature.hessian.ggn",
    "from gradleak.analysis.spectrum import Estimate": "curvature.spectrum.SampleMean",
    "from gradleak.analysis.association import Estimate": "curvature.association.IntervalEstimate",
    "from gradleak.study import Study": "curvature.study.Study",
    "import gradleak as gl; got = gl.analysis.certify": "identify.certificates.certify",
    "import gradleak as gl; got = gl.study.Study": "curvature.study.Study",
    "import gradleak as gl; got = gl.results.AuditResult": "audit.result.AuditResult",
    "import gradleak as gl; got = gl.distributed.RayWorkers": "ray.RayWorkers",
    "import gradleak as gl; got = gl.Scene": "parts.view.TargetView",
    "from gradleak.analysis.lanczos import Lanczos": "curvature.lanczos.LanczosRun",
    "from gradleak.audit import DEFAULT_ATTACKS": "auto.defaults.DEFAULT_ATTACKS",
    "from gradleak.audit.recorded import told": "audit.recorded.replay_text",
    "from gradleak.auto.again import looked_again": "auto.second_look.reconsidered_case",
    "from gradleak.attacks.analytic import Evaluate": "parts.optimisers.Still",
    "from gradleak.data.fetch import Progress": "data.fetch.BytesReceived",
    "from gradleak.defences.noise import at_least": "defences.settings.at_least",
    "from gradleak.parts.matches import Difference": "parts.protocols.Match",
    "from gradleak.parts.spans import telling": "parts.row_space.spanning_layers",
    "from gradleak.parts.surrogates import frozen": "attacks.sme.frozen",
    "from gradleak.results.labels import record": "audit.rows.guarantee_record",
    "from gradleak.scene import Problem": "parts.protocols.LaneObjective",
    "from gradleak.search import LaneProblem": "engine.search.StageObjective",
    "import gradleak.distributed; got = gradleak.distributed.RayWorkers": "ray.RayWorkers",
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old modules are imported for the first time in every test."""
    for name in compat.MOVED:
        monkeypatch.delitem(sys.modules, f"gradleak.{name}", raising=False)
        if "." not in name and name not in gl.__all__:
            monkeypatch.delitem(vars(gl), name, raising=False)


def _now(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"gradleak.{module}"), name)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_of_the_release_imports(name: str) -> None:
    moved = compat.MOVED.get(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = importlib.import_module(f"gradleak.{name}")
    ours = [each for each in caught if f"gradleak.{name} is now" in str(each.message)]
    assert [each.filename for each in ours] == ([__file__] if moved else [])
    names: dict[str, Any] = {}
    for home in moved or ():
        names = vars(importlib.import_module(f"gradleak.{home}")) | names  # the first home wins
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        renamed = {each for each in names if f"{name}.{each}" in compat.RENAMED}  # the name is another thing's now
        assert all(getattr(old, each) is names[each] for each in names.keys() - renamed if not each.startswith("_"))


@pytest.mark.parametrize("line", LINES)
def test_an_old_line_warns_where_it_stands_and_gives_the_new_object(line: str) -> None:
    names: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile("\n\n" + line, "theirs.py", "exec"), names)
    assert caught
    assert {(each.category, each.filename, each.lineno) for each in caught} == {(DeprecationWarning, "theirs.py", 3)}
    assert names.get("got", names.get(line.split()[-1])) is _now(LINES[line])


def test_a_second_import_warns_at_its_own_line_too() -> None:
    with pytest.warns(DeprecationWarning, match="is now"):
        importlib.import_module("gradleak.local")
    with pytest.warns(DeprecationWarning, match="gradleak.local.observe is now gradleak.scenario.client.observe"):
        from gradleak.local import observe
    assert observe is gl.observe


def test_modules_that_are_still_public_do_not_warn() -> None:
    with pytest.warns(DeprecationWarning, match="is now"):
        importlib.import_module("gradleak.tree")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gl.tree is importlib.import_module("gradleak.core.tree")
        assert callable(gl.tree.add)


def test_a_star_import_gives_the_names() -> None:
    names: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match="is now"):
        exec("from gradleak.local import *", names)
    assert names["LocalTraining"] is gl.LocalTraining


def test_unknown_names_say_where_to_look() -> None:
    with pytest.warns(DeprecationWarning, match="is now"):
        old = importlib.import_module("gradleak.local")
    with pytest.raises(AttributeError, match="has no 'nothing'; its names are in gradleak.scenario.client now"):
        _ = old.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from gradleak.local import nothing  # noqa: F401
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = gl.nothing


@pytest.mark.parametrize(("name", "advice"), [("bench", "python -m benchmarks"), ("analysis.trajectory", "papers")])
def test_what_is_gone_says_what_to_do(name: str, advice: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=advice):
        compat._Finder().find_spec(f"gradleak.{name}", [])
