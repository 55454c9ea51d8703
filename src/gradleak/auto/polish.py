"""Second-order steps from a candidate of another member: towards the images that give exactly this update."""

from __future__ import annotations

from collections.abc import Sequence

from gradleak.attack import Composed, Reconstruction
from gradleak.attacks.second_order import MOST_DENSE, SKETCH
from gradleak.attacks.second_order.krylov import GaussNewtonKrylov
from gradleak.auto.residual import Given, exactly
from gradleak.auto.traits import Case
from gradleak.core.listeners import Share
from gradleak.parts.levenberg import LevenbergMarquardt
from gradleak.parts.matches import Relative, Sketched
from gradleak.parts.predictions import Replay
from gradleak.parts.protocols import Match, Optimiser
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.scenario.client import Order
from gradleak.scenario.task import Batch

VECTORS = 100  # products of a matrix-free step


def polished(
    case: Case,
    rows: Sequence[int],
    batches: Sequence[Batch],
    order: Order | None,
    steps: int,
    seed: int,
    progress: Share | None = None,
) -> Reconstruction:
    """Damped Gauss-Newton steps without any prior, from one batch for each of these targets; labels stay as they are.

    A start that is nearly right converges to the solution near it. Any other is only fitted better, and the common
    residual then says nothing about its images: unsolved candidates are never called certain.
    """
    rows_of_sketch = SKETCH * case.unknowns
    large = case.equations > 2 * rows_of_sketch
    dense = case.unknowns <= MOST_DENSE and case.room(rows_of_sketch if large else case.equations)
    every = Relative()
    match: Match = Sketched(every, rows_of_sketch) if large and dense else every
    optimiser: Optimiser = (
        LevenbergMarquardt(steps=steps, damping=1e-4, homotopy=None)
        if dense
        else GaussNewtonKrylov(steps=max(1, steps // 2) * VECTORS, vectors=VECTORS)
    )
    stage = Stage(Pixels(as_given), Replay(order=order), match, (), optimiser)
    attack = Composed("polish", (stage,), Given(batches), keep="last")
    targets = [case.targets[row] for row in rows]
    return attack.run(case.task, targets, case.about(rows), seed, engine=exactly(case), progress=progress)
