"""Curvature beside leakage: log-determinants over rounds, how the two move together, and bounds on information."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from flat_minima.attacks import GRADIENT, MODES, knowledge, modes, observed
from flat_minima.training import RHO, Course, Effort, examples, targets, task_of

from gradleak.core import tree
from gradleak.curvature.association import associations
from gradleak.curvature.hessian import curvature, extremes, hessian
from gradleak.curvature.information import against_curvature, curvature_index, input_information, releases, sharpness
from gradleak.scenario.task import Batch

LOOKED_AT = 2  # targets whose pixels' information is computed, one dense Jacobian each
CONTROLS = ("gradient_norm", "round")


def some(effort: Effort, count: int) -> Batch:
    """The first examples of the training set: all clients', as in the paper."""
    data = examples(effort, "train")
    return data.batch(torch.arange(min(count, len(data))))


def curved(course: Course, effort: Effort, number: int) -> dict[str, Any]:
    """Log-determinant and the rest of the spectrum at a round, without the density."""
    sent = course.sent(effort, number)
    found = curvature(
        task_of(effort),
        sent.weights,
        some(effort, effort.curved),
        sent.buffers,
        engine=effort.engine,
        probes=effort.probes,
        steps=effort.lanczos,
        most_steps=4 * effort.lanczos,
        seed=effort.seed,
    )
    return {**found.to_json(points=0), "excess": found.excess, "frobenius": found.frobenius}


def gradient_norm(course: Course, effort: Effort, number: int, truth: Batch) -> float:
    """The mean length of the targets' plain gradients."""
    seen = observed(course, effort, number, truth, MODES["a"])
    return sum(float(tree.norm(each.update)) for each in seen) / len(seen)


def associated(runs: Sequence[Sequence[Mapping[str, Any]]], attack: str, mode: str) -> dict[str, Any]:
    """Each curve against the PSNR of an attack: rank correlations, plain and with gradient norm and round known.

    `runs`: the points of one training, or of several with other seeds at the same rounds.
    """

    def values(read: Any) -> list[Any]:
        found = [[float(read(point)) for point in points] for points in runs]
        return found if len(found) > 1 else found[0]

    curves = {
        "psnr": values(lambda point: point["cells"][attack][mode]["psnr"]["mean"]),
        "round": values(lambda point: point["round"]),
        "gradient_norm": values(lambda point: point["gradient_norm"]),
        "excess": values(lambda point: point["curvature"]["excess"]),
        "lambda_max": values(lambda point: point["curvature"]["extremes"]["highest"]),
        "trace": values(lambda point: point["curvature"]["trace"]["value"]),
        "loss": values(lambda point: point["curvature"]["loss"]),
        "test_accuracy": values(lambda point: point["test_accuracy"]),
    }
    return {name: each.record() for name, each in associations(curves, "psnr", CONTROLS).items()}


def informed(course: Course, effort: Effort, number: int) -> dict[str, Any]:
    """The paper's printed index, the step Sigma_G = H / B behind it, and two statements that do hold.

    index        Theorems 3.1 and 3.2 as printed: no bound on information (`analysis.information.CurvatureIndex`)
    covariance   of plain gradients, against H
    channel      bound on I(X; G + Z) for the covariance of the releases, plain and as the method's clients send them
    input        first-order information about the pixels of some targets in modes (a) and (c)
    """
    task, sent, engine = task_of(effort), course.sent(effort, number), effort.engine
    batch, measured = some(effort, effort.curved), curved(course, effort, number)
    operator = hessian(task, sent.weights, batch, sent.buffers, engine=engine)
    ends = extremes(operator, steps=effort.lanczos // 2, most_steps=4 * effort.lanczos, seed=effort.seed)
    ball = sharpness(task, sent.weights, batch, RHO, top=ends.top, seed=effort.seed, engine=engine)
    log_det, size = measured["log_determinant"]["value"], measured["size"]
    server = course.federation(effort).server("broadcast", number, dict(sent.server) or None)
    many, truth = some(effort, effort.released), targets(effort, LOOKED_AT)
    clients = {"plain": None, **({} if course.defence(effort) is None else {"sent": course.defence(effort)})}
    seen = {
        label: releases(task, sent.weights, many, defence, training=GRADIENT, server=server, engine=engine)
        for label, defence in clients.items()
    }
    covariance = against_curvature(
        seen["plain"], measured["trace"]["value"], torch.tensor([ends.highest], dtype=torch.float64), log_det=log_det
    )
    inputs: dict[str, list[Any]] = {}
    for letter, mode in modes(course, effort).items():
        if letter == "b":  # an attacker that knows less has no other update
            continue
        for row, each in enumerate(observed(course, effort, number, truth, mode)):
            own = {name: value[row] for name, value in truth.items()}
            told = input_information(task, each, own, knowledge(course, effort, mode), engine=engine)
            inputs.setdefault(letter, []).append([level.record() for level in told])
    return {
        "curvature": measured,
        "sharpness": ball.record(),
        "index": {
            str(count): {
                name: value
                for name, value in curvature_index(size, count, log_det=log_det, sharpness=ball).record().items()
                if name in ("determinant", "ball", "sharper")
            }
            for count in (1, 64)
        },
        "covariance": covariance.record(),
        "channel": {label: each.curve(seed=effort.seed).record() for label, each in seen.items()},
        "input": inputs,
    }
