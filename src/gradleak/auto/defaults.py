"""The attacks of an audit that names none."""

from __future__ import annotations

from gradleak.core import registry
from gradleak.engine import Engine
from gradleak.parts.row_space import spanning_layers
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Task

# Chosen for two minutes on two cores, on twenty CIFAR-10 images with their scores in view.
DEFAULT_ATTACKS = ("cpl:steps=1000", "idlg:steps=1200", "ig:steps=1000")  # the first must pass the positive control
# Few unknowns: the exact search takes seconds.
_FEW = ("second-order", "idlg:steps=1200", "ig:steps=1000")
_ROWS = ("sparse-span", *_FEW, "tableak:steps=400,restarts=8")
_TEXTS = ("span-text", "token-rows")
BY_KIND = {"vector": ("sparse-span", *_FEW), "table": _ROWS, "series": _FEW, "value": _FEW, "tokens": _TEXTS}
DEFAULT_ON_GPU = ("second-order",)  # exact; half a second for an image of 32 x 32 there, a minute on two cores


def default_attacks(
    engine: Engine, task: Task | None = None, examples: int | None = 1, training: LocalTraining | None = None
) -> tuple[str, ...]:
    """The attacks that an audit on this engine runs if it names none.

    task       None: a classification
    examples   in an update; None: updates have different numbers of them
    training   the clients' recipe; None: one gradient
    """
    if task is not None and {"t", "noise"} <= task.drawn:
        return _of_denoisers(task, examples, training)
    images = DEFAULT_ATTACKS + (DEFAULT_ON_GPU if engine.where.type == "cuda" else ())
    if task is None or "x" not in task.fields:
        return images
    wanted = BY_KIND.get(task.fields["x"].kind.name, images)
    # An attack that cannot attack this task is left out; if none can, the audit says why.
    public = [name for name, field in task.fields.items() if field.public]
    return tuple(name for name in wanted if not registry.parse("attack", name).refuses(task, public)) or wanted


def _of_denoisers(task: Task, examples: int | None, training: LocalTraining | None) -> tuple[str, ...]:
    """Granted fields are used, not searched for. Several gradients add up, so the step t cannot be read off them.

    Restarts rather than waves, because the cost of waves is unknown beforehand; `span-dm` may, its starts are cheap.
    """
    single = training is None or len(training.order(examples or 1)) == 1
    plain_rule = training is None or isinstance(training.optimiser, SGD)
    t = "analytic" if single else "soft"
    plain = tuple(f"dlg-dm:noise=unknown,t={t},param={param},steps=1000,restarts=4" for param in ("x0_eps", "xt_q"))
    if not single:
        return plain
    spectral = (*plain, f"spectral-dm:noise=unknown,t={t},steps=800,restarts=4")
    return (*spectral, "span-dm") if examples and plain_rule and spanning_layers(task, examples) else spectral
