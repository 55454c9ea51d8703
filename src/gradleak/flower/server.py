"""The server's side of Flower: the server hooks of a defence around a strategy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from gradleak.adapters import sorted_state
from gradleak.core import tree
from gradleak.core.tree import Params, Tree
from gradleak.data import load
from gradleak.federation import Federation
from gradleak.federation.uploads import accepted, mean_buffers
from gradleak.flower.records import (
    EXTRAS,
    FlowerError,
    examples_of,
    model_record,
    params_of,
    placed,
    record_of,
    replaced,
)
from gradleak.flower.wrapped import Wrapped
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.task import Task, float32_products


class Defended(Wrapped):
    """This library's FedAvg with the server hooks of a defence; the wrapped strategy chooses the clients.

        strategy = Defended(FedAvg(fraction_train=0.5), task, FedGF(), Federation(clients=10, seed=0))

    strategy     its sampling, evaluation and averaging of metrics are used
    defence      `initial` before round 1, `broadcast` beside the model, `aggregate`, `idle` and `advance` after a round
    federation   clients, participation (for the calibration of noise and accountants), server_lr, weighting and seed

    Clients answer with `flower.train`. Unsound uploads are excluded; `excluded` says which and why, by round.
    """

    def __init__(
        self, strategy: FedAvg, task: Task, defence: Defence | None = None, federation: Federation | None = None
    ) -> None:
        self.strategy, self.task = strategy, task
        self.defence, self.federation = defence or Defence(), federation or Federation()
        self.excluded: dict[int, dict[int, str]] = {}
        self._memory: Tree = {}
        self._sent: tuple[ArrayRecord, Params, Params] | None = None

    # --- training ----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        number = server_round - 1
        state = params_of(arrays)
        like = tree.like(self.task.weights())
        weights, buffers = (placed(part, like) for part in sorted_state(state, self.task))
        if self._sent is None:
            with torch.no_grad(), float32_products():
                server = {**self._server("initial", number), "task": self.task, "load": load}
                initial = self.defence.initial(weights, server)
            weights, buffers = (
                {name: initial.get(name, value) for name, value in part.items()} for part in (weights, buffers)
            )
            arrays = replaced(arrays, state, {**weights, **buffers}, self.task)
            self._memory = self.defence.advance(weights, weights, (), self._server("advance", number - 1))
        self._sent = arrays, weights, buffers
        extras = self.defence.broadcast(weights, self._server("broadcast", number))
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        for content in {id(message.content): message.content for message in messages}.values():
            for what, params in extras.items():
                content[EXTRAS + what] = record_of(params)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if self._sent is None:
            raise FlowerError("aggregate_train came before configure_train: nothing has been sent.")
        record, weights, buffers = self._sent
        state = params_of(record)
        answers = {reply.metadata.src_node_id: reply for reply in replies}
        failed = {node: str(reply.error.reason) for node, reply in answers.items() if reply.has_error()}
        uploads, unfit = self._uploads({node: reply for node, reply in answers.items() if node not in failed}, weights)
        taken = accepted(uploads, weights)
        self.excluded[server_round] = {**failed, **unfit, **taken.excluded}
        server = {**self._server("aggregate", server_round - 1), "weights": weights}
        sizes = [
            upload.num_examples if self.federation.weighting == "examples" else 1 for upload in taken.uploads.values()
        ]
        sound, metrics = list(taken.uploads.values()), None
        with torch.no_grad(), float32_products():
            step = self.defence.aggregate(sound, sizes, server) if sound else self.defence.idle(server)
            after = (
                weights
                if step is None
                else tree.detach(tree.subtract(weights, tree.scale(step, self.federation.server_lr)))
            )
            new_buffers = mean_buffers(sound, sizes, buffers) if sound else buffers
            self._memory = self.defence.advance(weights, after, sound, self._server("advance", server_round - 1))
        if sound:
            metrics = self.strategy.train_metrics_aggr_fn(
                [answers[node].content for node in taken.uploads], self.strategy.weighted_by_key
            )
        if step is None:
            return None, metrics
        return replaced(record, state, {**after, **new_buffers}, self.task), metrics

    def _uploads(self, replies: dict[int, Message], weights: Params) -> tuple[dict[int, Upload | None], dict[int, str]]:
        """The uploads by node, and the reason for each reply that is none."""
        like = tree.like(weights)
        uploads: dict[int, Upload | None] = {}
        unfit: dict[int, str] = {}
        for node, reply in replies.items():
            try:
                _, record = model_record(reply.content, self.strategy.arrayrecord_key)
                new, buffers = (placed(part, like) for part in sorted_state(params_of(record), self.task))
                update = tree.map(torch.sub, weights, new)
                uploads[node] = Upload({"update": update}, examples_of(reply.content), buffers or None)
            except (ValueError, RuntimeError) as problem:  # other names, other shapes, no number of examples
                unfit[node] = str(problem).partition("\n")[0]
        return uploads, unfit

    def _server(self, hook: str, number: int) -> Tree:
        like = tree.like(self.task.weights())
        server = self.federation.server(hook, number, None if hook == "initial" else self._memory)
        return {**server, "key": server["key"].to(like.device)}
