"""A server's side of Flower: the server hooks of a defence around a strategy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from gradleak.adapters import own_names, sorted_state, tied
from gradleak.core import tree
from gradleak.core.tree import Params, Tree
from gradleak.data import load
from gradleak.federation import Federation
from gradleak.federation.uploads import accepted, mean_buffers
from gradleak.flower.records import EXTRAS, FlowerError, examples_of, model_record, params_of, placed, record_of
from gradleak.flower.wrapped import Wrapped
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.task import Task, float32_products


class Defended(Wrapped):
    """FedAvg as this library has it, with the server's hooks of a defence; the wrapped strategy chooses the clients.

        strategy = Defended(FedAvg(fraction_train=0.5), task, FedGF(), Federation(clients=10, seed=0))

    strategy     of which sampling, evaluation and the averaging of metrics are used
    defence      `initial` before round 1, `broadcast` beside the model, `aggregate`, `idle` and `advance` after a round
    federation   clients, participation (what noise and accountants are calibrated to), server_lr, weighting and seed

    Clients answer with `flower.train`. Uploads that do not fit are left out; `excluded` says which and why, by round.
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
        like = next(iter(self.task.weights().values()))
        weights, buffers = (placed(part, like) for part in sorted_state(state, self.task))
        if self._sent is None:
            with torch.no_grad(), float32_products():
                told = {**self._server("initial", number), "task": self.task, "load": load}
                found = self.defence.initial(weights, told)
            weights, buffers = (
                {name: found.get(name, value) for name, value in part.items()} for part in (weights, buffers)
            )
            arrays = self._record(arrays, state, weights, buffers)
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
        held, metrics = list(taken.uploads.values()), None
        with torch.no_grad(), float32_products():
            step = self.defence.aggregate(held, sizes, server) if held else self.defence.idle(server)
            after = (
                weights
                if step is None
                else tree.detach(tree.subtract(weights, tree.scale(step, self.federation.server_lr)))
            )
            new_buffers = mean_buffers(held, sizes, buffers) if held else buffers
            self._memory = self.defence.advance(weights, after, held, self._server("advance", server_round - 1))
        if held:
            metrics = self.strategy.train_metrics_aggr_fn(
                [answers[node].content for node in taken.uploads], self.strategy.weighted_by_key
            )
        if step is None:
            return None, metrics
        return self._record(record, state, after, new_buffers), metrics

    def _uploads(self, replies: dict[int, Message], weights: Params) -> tuple[dict[int, Upload | None], dict[int, str]]:
        """What each client sent, as updates; and why others are none."""
        like = next(iter(weights.values()))
        found: dict[int, Upload | None] = {}
        unfit: dict[int, str] = {}
        for node, reply in replies.items():
            try:
                _, record = model_record(reply.content, self.strategy.arrayrecord_key)
                new, buffers = (placed(part, like) for part in sorted_state(params_of(record), self.task))
                update = tree.map(torch.sub, weights, new)
                found[node] = Upload({"update": update}, examples_of(reply.content), buffers or None)
            except (ValueError, RuntimeError) as problem:  # other names, other shapes, no number of examples
                unfit[node] = str(problem).partition("\n")[0]
        return found, unfit

    def _server(self, hook: str, number: int) -> Tree:
        like = next(iter(self.task.weights().values()))
        server = self.federation.server(hook, number, None if hook == "initial" else self._memory)
        return {**server, "key": server["key"].to(like.device)}

    def _record(self, like: ArrayRecord, state: Params, weights: Params, buffers: Params) -> ArrayRecord:
        """A model in the names, order and types of the one that the strategy was started with."""
        names = own_names(state, self.task)
        held = {**weights, **buffers}
        held |= {name: held[first] for name, first in tied(self.task).items()}
        return ArrayRecord({name: held[names[name]].detach().cpu().to(state[name].dtype) for name in like})
