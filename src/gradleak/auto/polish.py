"""Second-order steps from a candidate that somebody else found: towards the images that give exactly this update."""

from __future__ import annotations

from collections.abc import Sequence

from gradleak.attack import Composed, Progress, Reconstruction, Stage
from gradleak.attacks.second_order import MOST_DENSE, SKETCH
from gradleak.auto.case import Case
from gradleak.auto.residual import Given, about, as_given, exactly
from gradleak.local import Order
from gradleak.parts.krylov import GaussNewtonKrylov
from gradleak.parts.levenberg import LevenbergMarquardt
from gradleak.parts.matches import Relative, Sketched
from gradleak.parts.predictions import Replay
from gradleak.parts.spaces import Pixels
from gradleak.scene import Match, Optimiser
from gradleak.task import Batch

VECTORS = 100  # products of a matrix-free step


def polished(
    case: Case,
    rows: Sequence[int],
    batches: Sequence[Batch],
    order: Order | None,
    steps: int,
    seed: int,
    progress: Progress | None = None,
) -> Reconstruction:
    """Damped Gauss-Newton steps without any prior, from one batch for each of these targets; labels stay as they are.

    A start that is nearly right is drawn to the solution beside it; one that is not is only fitted better, and the
    common residual then says nothing about its images. That is why unsolved candidates are never called certain.
    """
    wanted = SKETCH * case.unknowns
    large = case.equations > 2 * wanted
    dense = case.unknowns <= MOST_DENSE and case.room(wanted if large else case.equations)
    every = Relative()
    match: Match = Sketched(every, wanted) if large and dense else every
    optimiser: Optimiser = (
        LevenbergMarquardt(steps=steps, damping=1e-4, homotopy=None)
        if dense
        else GaussNewtonKrylov(steps=max(1, steps // 2) * VECTORS, vectors=VECTORS)
    )
    stage = Stage(Pixels(as_given), Replay(order=order), match, (), optimiser)
    attack = Composed("polish", (stage,), Given(batches), keep="last")
    targets = [case.targets[row] for row in rows]
    return attack.run(case.task, targets, about(case, rows), seed, engine=exactly(case), progress=progress)
