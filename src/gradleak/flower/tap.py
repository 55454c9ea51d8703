"""Tap: a strategy that records what its server saw, and changes nothing else."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from gradleak import __version__
from gradleak.adapters import own_names
from gradleak.audit.rows import guarantee_record as label
from gradleak.flower.privacy import recognised
from gradleak.flower.recording import Recording, Written, entries_of
from gradleak.flower.records import EXAMPLES, FlowerError, examples_of, extra_records, model_record
from gradleak.flower.wrapped import Wrapped
from gradleak.scenario.guarantee import Exposure
from gradleak.scenario.observation import MOST
from gradleak.scenario.task import Task

KEEP = ("observations", "aggregate", "summary")


@dataclass
class _OpenRound:
    """One recorded round between its messages and its replies."""

    sent: dict[int, Message] = field(default_factory=dict)  # by node
    seconds: float = 0.0


class Tap(Wrapped):
    """Any strategy of Flower's message API, with a record of what the server was sent.

    rounds    to record, by Flower's numbers, from 1; None: all
    clients   how many of a round's clients (those with the lowest numbers), or which nodes; None: all
    keep      "observations": what each client sent. "aggregate": only the aggregate of a round, one observation of many
              clients (all that is seen under secure aggregation). "summary": no tensors, only the record
    out       the folder; if it holds another recording, OUT-2, OUT-3, ...
    task      of the model: says which tensors are trained; None: decided by names and dtypes

    Put it outermost, around wrappers for privacy: the server sees replies before those change them. Clients that fail,
    do not answer, or answer with something that is no model are lines of the record. An observation is written tensor
    by tensor and not held in memory. `round` of an Observation is Flower's.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        rounds: Collection[int] | None = None,
        clients: int | Collection[int] | None = None,
        keep: str = "observations",
        out: str | os.PathLike[str] = "observations",
        task: Task | None = None,
    ) -> None:
        if keep not in KEEP:
            raise FlowerError(f"keep must be {', '.join(map(repr, KEEP))}; given {keep!r}.")
        if isinstance(clients, int) and clients < 1:
            raise FlowerError(f"clients must be at least 1, or the nodes to record; given {clients}.")
        self.strategy, self.keep = strategy, keep
        self.rounds = None if rounds is None else frozenset(rounds)
        self.clients = clients if clients is None or isinstance(clients, int) else frozenset(clients)
        self.recording = Recording(out)
        self._task = task
        self._open: dict[int, _OpenRound] = {}
        self._done = 0

    @property
    def folder(self) -> Any:
        """Where the recording is."""
        return self.recording.folder

    # --- the strategy's methods, recorded ----------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._noted(server_round, self.strategy.configure_train(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self._recorded(server_round, replies, self.strategy.aggregate_train)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Flower's loop. If the strategy has its own loop, that one, with its two training methods recorded."""
        inner = self.strategy
        if type(inner).start is Strategy.start:
            return super().start(*args, **kwargs)
        configure, aggregate, members = inner.configure_train, inner.aggregate_train, vars(inner)
        before: dict[str, Any] = {
            name: members[name] for name in ("configure_train", "aggregate_train") if name in members
        }
        try:
            members["configure_train"] = lambda server_round, *rest, **named: self._noted(
                server_round, configure(server_round, *rest, **named)
            )
            members["aggregate_train"] = lambda server_round, replies: self._recorded(server_round, replies, aggregate)
            return inner.start(*args, **kwargs)
        finally:
            del members["configure_train"], members["aggregate_train"]
            members.update(before)

    # --- recording ---------------------------------------------------------------------------------------------------

    def _noted(self, server_round: int, messages: Iterable[Message]) -> Iterable[Message]:
        if self.rounds is not None and server_round not in self.rounds:
            return messages
        began, sent = time.perf_counter(), list(messages)
        open_round = _OpenRound({message.metadata.dst_node_id: message for message in sent})
        open_round.seconds = time.perf_counter() - began
        self._open[server_round] = open_round
        return sent

    def _recorded(
        self,
        server_round: int,
        replies: Iterable[Message],
        aggregate: Callable[[int, Iterable[Message]], tuple[ArrayRecord | None, MetricRecord | None]],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        open_round = self._open.pop(server_round, None)
        if open_round is None:
            return aggregate(server_round, replies)
        # Recorded before the strategy runs: privacy wrappers change replies in place, after the server has seen them.
        began, answers = time.perf_counter(), list(replies)
        rows = self._of_clients(server_round, open_round, answers)
        seconds = open_round.seconds + time.perf_counter() - began
        try:
            arrays, metrics = aggregate(server_round, answers)
        except Exception as problem:  # the training ends here; what the server saw of the round is recorded
            reason = f"{type(problem).__name__}: {problem}"
            self._tell(
                server_round, [*rows, {"round": server_round, "node": None, "status": "error", "reason": reason}]
            )
            raise
        began = time.perf_counter()
        self._done += 1
        aggregated = self._of_round(server_round, open_round, rows, arrays)
        disk = sum(row.get("disk_seconds", 0.0) for row in (*rows, aggregated))
        spent = {"round": server_round, "tap_seconds": seconds + time.perf_counter() - began - disk}
        self._tell(server_round, [*rows, aggregated, {**spent, "disk_seconds": disk}])
        return arrays, metrics

    def _tell(self, server_round: int, lines: list[dict[str, Any]]) -> None:
        try:
            self.recording.describe(self._about(server_round))
            self.recording.add(lines)
        except OSError as problem:
            warnings.warn(f"Round {server_round} could not be recorded: {problem}.", RuntimeWarning, stacklevel=3)

    def _of_clients(self, server_round: int, open_round: _OpenRound, replies: list[Message]) -> list[dict[str, Any]]:
        """One line for every chosen client, whatever its answer, and for every other client that answered."""
        wanted = self._wanted(open_round)
        rows: dict[int, dict[str, Any]] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if node in rows and rows[node]["status"] != "error":
                rows[node]["repeated"] = rows[node].get("repeated", 0) + 1  # the first one counts
                continue
            rows[node] = {
                "round": server_round,
                "node": node,
                **self._of_reply(server_round, open_round, reply, wanted),
            }
        for node in open_round.sent:
            rows.setdefault(node, {"round": server_round, "node": node, "status": "no reply"})
        return list(rows.values())

    def _wanted(self, open_round: _OpenRound) -> set[int]:
        if isinstance(self.clients, int):
            return set(sorted(open_round.sent)[: self.clients])  # the same clients in every round they take part in
        return set(open_round.sent) if self.clients is None else set(open_round.sent) & self.clients

    def _of_reply(self, server_round: int, open_round: _OpenRound, reply: Message, wanted: set[int]) -> dict[str, Any]:
        node = reply.metadata.src_node_id
        if reply.has_error():
            return {"status": "error", "reason": str(reply.error.reason)}
        if node not in open_round.sent:
            return {"status": "not asked"}
        try:
            examples = examples_of(reply.content, getattr(self.strategy, "weighted_by_key", EXAMPLES))
        except FlowerError as problem:
            examples = None
            if self.keep == "observations":
                return {"status": "unusable", "reason": str(problem)}
        counted = {} if examples is None else {"num_examples": examples}
        if node not in wanted or self.keep != "observations":
            return {"status": "answered", **counted}
        try:
            written = self._write(server_round, open_round.sent[node], reply, node, examples or 1)
        except OSError as problem:  # a full disk must not end a training
            return {"status": "not written", "reason": str(problem), **counted}
        except (ValueError, TypeError, EOFError) as problem:  # FlowerError, or NumPy's, of bytes that are no array
            return {"status": "unusable", "reason": str(problem), **counted}
        return {"status": "recorded", **counted, **asdict(written)}

    def _write(self, server_round: int, sent: Message, reply: Message, node: int, examples: int) -> Written:
        key = getattr(self.strategy, "arrayrecord_key", "arrays")
        (_, before), (_, after) = model_record(sent.content, key), model_record(reply.content, key)
        header = self._header(server_round, f"node{node}/round{server_round}", examples, 1)
        entries = entries_of(before, after, extra_records(sent.content), self._trained(before))
        return self.recording.write(f"round{server_round:04d}-node{node}", header, entries)

    def _of_round(
        self, server_round: int, open_round: _OpenRound, rows: list[dict[str, Any]], arrays: ArrayRecord | None
    ) -> dict[str, Any]:
        """The line of the round's aggregate."""
        line: dict[str, Any] = {"round": server_round, "node": None}
        if arrays is None:
            return {**line, "status": "not aggregated"}
        counted = getattr(self.strategy, "aggregated", None)  # secure aggregation knows this, the replies do not say it
        clients, examples = (
            counted
            if counted is not None
            else (
                sum(row["status"] in ("answered", "recorded", "unusable", "not written") for row in rows),
                sum(row.get("num_examples", 0) for row in rows),
            )
        )
        line |= {"status": "aggregated", "clients": clients, "num_examples": examples}
        if self.keep != "aggregate" or not open_round.sent:
            return line
        first = next(iter(open_round.sent.values()))
        try:
            _, before = model_record(first.content, getattr(self.strategy, "arrayrecord_key", "arrays"))
            header = self._header(server_round, f"round{server_round}", max(1, examples), max(1, clients))
            entries = entries_of(before, arrays, extra_records(first.content), self._trained(before))
            return {**line, **asdict(self.recording.write(f"round{server_round:04d}", header, entries))}
        except (ValueError, OSError) as problem:  # FlowerError, or BadObservation of a model that is not the task's
            return {**line, "reason": str(problem)}

    def _trained(self, record: ArrayRecord) -> frozenset[str] | None:
        """The names in a record of the tensors that are trained, if the task is known."""
        if self._task is None:
            return None
        trained = self._task.weights().keys()
        return frozenset(name for name, own in own_names(record, self._task).items() if own in trained)

    @staticmethod
    def _header(server_round: int, key: str, examples: int, clients: int) -> dict[str, Any]:
        return {"num_examples": min(examples, MOST), "round": server_round, "clients": clients, "key": key}

    def _about(self, server_round: int) -> dict[str, Any]:
        known = recognised(self.strategy, Exposure(rounds=server_round))
        return {
            "format": "gradleak.recording",
            "version": 1,
            "gradleak": __version__,
            "flwr": version("flwr"),
            "strategy": _name(self.strategy),
            "keep": self.keep,
            "rounds_recorded": self._done,
            "privacy": [{"wrapper": one.name, "says": one.text, "guarantee": label(one.guarantee)} for one in known],
        }


def _name(strategy: Any) -> str:
    """The strategy and all that it wraps, outermost first."""
    inner = getattr(strategy, "strategy", None)
    name = type(strategy).__name__
    return name if inner is None else f"{name}({_name(inner)})"
