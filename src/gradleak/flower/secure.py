"""Secure aggregation over Flower's messages: the server learns the sum of the updates, and not the updates.

docs/secure-aggregation.md describes the protocol, its assumptions and what it hides. Its four stages travel as
messages: two queries before the training (keys, shares), the train message itself (masked values) and one query after
it (shares that remove the masks from the sum). Flower starts a process for each message, so a client keeps its state
in `context.state` in between, which stays on its node.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log

from gradleak.adapters import sorted_state
from gradleak.core import tree
from gradleak.flower.records import FlowerError, examples_of, model_record, params_of, replaced
from gradleak.flower.wrapped import Wrapped
from gradleak.scenario.task import Task
from gradleak.secure import (
    Client,
    FixedPoint,
    Identity,
    Member,
    Oversize,
    Part,
    Plan,
    Roster,
    SecureError,
    Server,
    Stage,
    flat,
    restored,
)

ACTION = "secure"
QUERY = f"query.{ACTION}"
RECORD = "gradleak.secure"  # config record of messages, and of a client's state
UPDATE, COUNT = "update", "examples"


@dataclass(frozen=True)
class Agreement:
    """What clients and server agree on before the training, through a channel that the server cannot change.

    roster        who may take part, by number, and their public keys (`Identity.public`)
    clip          the largest magnitude of an entry of an update; a client with a larger one drops out of the round
    examples      the largest number of examples of a client
    minimum, threshold, neighbours, ring_bits   see `secure.Plan`
    """

    roster: Roster
    clip: float
    examples: int = 10**6
    minimum: int = 3
    threshold: int | None = None
    neighbours: int | None = None
    ring_bits: int = 64

    def plan(self, size: int, session: bytes, round: int) -> Plan:
        """The plan of one round, for a model with this many trained entries."""
        clients = len(self.roster)
        parts = (
            Part(UPDATE, size, FixedPoint.finest(self.clip, clients, ring_bits=self.ring_bits)),
            Part(COUNT, 1, FixedPoint(float(self.examples), 0)),
        )
        settings = {name: getattr(self, name) for name in ("minimum", "threshold", "neighbours", "ring_bits")}
        return Plan(self.roster, parts, session, round, **settings)


# --- a client ---------------------------------------------------------------------------------------------------------


class SecureClient:
    """A client's half: a mod around its training, and the answers to the server's queries.

        secure = SecureClient(agreement, task, number, identity)
        app.query("secure")(secure.answer)

        @app.train(mods=[secure])
        def train(message, context): ...

    number, identity   of this client in the roster; functions of the Context if one app serves many clients

    Only masked values leave: weights, metrics and the number of examples are removed from the reply. The client's
    state between messages, secrets included, is in `context.state`.
    """

    def __init__(
        self,
        agreement: Agreement,
        task: Task,
        number: int | Callable[[Context], int],
        identity: Identity | Callable[[Context], Identity],
    ) -> None:
        self.agreement, self.task, self.number, self.identity = agreement, task, number, identity

    def answer(self, message: Message, context: Context) -> Message:
        """The queries: advertise keys, share keys, unmask."""
        request = _record(message.content)
        stage, content = Stage[str(request["stage"])], _bytes(request.get("content", b""))
        if stage is Stage.ADVERTISE:
            member = self._member(context)
            client = member.join(self._plan(request))
            sent = client.advertise()
            self._keep(context, member, client, request)
            return _reply(message, sent)
        member, client, saved = self._resumed(context)
        sent = client.share(content) if stage is Stage.SHARE else client.unmask(content)
        self._keep(context, member, client if stage is Stage.SHARE else None, saved)
        return _reply(message, sent)

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Train, and mask the result."""
        request = _record(message.content)
        _, record = model_record(message.content)
        before = params_of(record)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        member, client, saved = self._resumed(context)
        client.accept(_bytes(request["content"]))
        weights, _ = sorted_state(before, self.task)
        after, _ = sorted_state(params_of(model_record(reply.content)[1]), self.task)
        try:
            count = examples_of(reply.content)
        except FlowerError:  # its text names the number, and errors travel to the server
            raise FlowerError(
                "The training must return its number of examples, a whole number of at least 1."
            ) from None
        values = {UPDATE: flat(tree.subtract(weights, after)), COUNT: np.array([float(count)])}
        try:
            sent = client.mask(values)
        except Oversize:  # its text names the largest entry, and errors travel to the server
            raise FlowerError("The update, or the number of examples, is above the agreed limit (clip).") from None
        self._keep(context, member, client, saved)
        return _reply(message, sent)

    def _plan(self, request: Mapping[str, Any]) -> Plan:
        """The plan by this client's own agreement: the server chooses session and round only."""
        size = tree.size(self.task.weights())
        return self.agreement.plan(size, _bytes(request["session"]), int(request["round"]))

    def _member(self, context: Context) -> Member:
        number = self.number(context) if callable(self.number) else self.number
        identity = self.identity(context) if callable(self.identity) else self.identity
        record = context.state.config_records.get(RECORD)
        history = {} if record is None else json.loads(str(record["history"]))
        joined = {
            bytes.fromhex(name): (last, attempt, Stage[stage]) for name, (last, attempt, stage) in history.items()
        }
        return Member(number, identity, joined)

    def _resumed(self, context: Context) -> tuple[Member, Client, dict[str, Any]]:
        record = context.state.config_records.get(RECORD)
        if record is None or not record.get("state"):
            raise FlowerError("This client has not advertised keys in this round: it joins the next one.")
        member, request = self._member(context), {"session": record["session"], "round": record["round"]}
        client = member.resume(self._plan(request), _bytes(record["state"]))
        context.state[RECORD] = ConfigRecord({**dict(record), "state": b""})  # a state is used once
        return member, client, request

    @staticmethod
    def _keep(context: Context, member: Member, client: Client | None, request: Mapping[str, Any]) -> None:
        joined = {name.hex(): (last, attempt, stage.name) for name, (last, attempt, stage) in member.history.items()}
        history = json.dumps(joined)
        state = b"" if client is None else client.suspend()
        context.state[RECORD] = ConfigRecord(
            {"session": request["session"], "round": request["round"], "state": state, "history": history}
        )


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass
class _Round:
    plan: Plan
    server: Server
    nodes: dict[int, int]  # client -> node
    record: ArrayRecord
    trouble: list[str] = field(default_factory=list)


class SecureAggregation(Wrapped):
    """FedAvg over secure sums: the mean of the clients' updates, each counted once.

    strategy    only its sampling and evaluation are used; only the clients it samples are asked
    agreement   the same as the clients'
    timeout     seconds for each of the three queries; the training itself has Flower's

    Clients may drop out at any stage. If fewer than the threshold remain, the round has no sum: the model does not
    change, and `trouble` says why. `aggregated` holds the numbers of clients and examples of the last sum. Running
    statistics are not sent: the model keeps those it began with.
    """

    def __init__(self, strategy: Strategy, agreement: Agreement, task: Task, *, timeout: float = 600.0) -> None:
        self.strategy, self.agreement, self.task, self.timeout = strategy, agreement, task, timeout
        self.session = secrets.token_bytes(16)
        self.trouble: dict[int, list[str]] = {}
        self.aggregated: tuple[int, int] | None = None
        self._round: _Round | None = None
        self._grid: Grid | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Run the first two stages by queries; returns the messages of the third."""
        self._grid, self._round = grid, None
        self.trouble[server_round] = []
        messages = {
            one.metadata.dst_node_id: one for one in self.strategy.configure_train(server_round, arrays, config, grid)
        }
        plan = self.agreement.plan(tree.size(self.task.weights()), self.session, server_round)
        now = _Round(plan, Server(plan), {}, arrays, self.trouble[server_round])
        try:
            self._query(now, Stage.ADVERTISE, dict.fromkeys(messages, b""), names=True)
            directories = now.server.advance()
            self._query(now, Stage.SHARE, {now.nodes[client]: sent for client, sent in directories.items()})
            deliveries = now.server.advance()
        except SecureError as problem:
            return self._without(now, problem)
        self._round = now
        ready = []
        for client, delivery in deliveries.items():
            message = messages[now.nodes[client]]
            content = RecordDict(dict(message.content))  # a copy: Flower gives all messages the same content
            content[RECORD] = self._request(now, Stage.MASK, delivery)
            ready.append(Message(content, dst_node_id=now.nodes[client], message_type=message.metadata.message_type))
        return ready

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Run the last stage by a query, and apply the mean."""
        now, self._round, self.aggregated = self._round, None, None
        if now is None:
            return None, None
        self._received(now, replies)
        try:
            requests = now.server.advance()
            self._query(now, Stage.UNMASK, {now.nodes[client]: sent for client, sent in requests.items()})
            now.server.advance()
        except SecureError as problem:
            self._without(now, problem)
            return None, None
        clients, sums = len(now.server.survivors), now.server.sums
        self.aggregated = clients, round(float(sums[COUNT][0]))
        state = params_of(now.record)
        weights, _ = sorted_state(state, self.task)
        mean = tree.scale(restored(sums[UPDATE], weights), 1 / clients)
        after = tree.map(lambda value, step: (value.double() - step).to(value.dtype), weights, mean)
        metrics = MetricRecord({"clients": clients, "num-examples": self.aggregated[1]})
        return replaced(now.record, state, after, self.task), metrics

    # --- messages ----------------------------------------------------------------------------------------------------

    def _query(self, now: _Round, stage: Stage, contents: Mapping[int, bytes], names: bool = False) -> None:
        """Query nodes and pass their answers to the server; a node that does not answer has dropped out."""
        assert self._grid is not None
        messages = [
            Message(RecordDict({RECORD: self._request(now, stage, content)}), dst_node_id=node, message_type=QUERY)
            for node, content in contents.items()
        ]
        replies = list(self._grid.send_and_receive(messages, timeout=self.timeout))
        self._received(now, replies, names)
        for node in contents.keys() - {reply.metadata.src_node_id for reply in replies}:
            now.trouble.append(f"node {node} did not answer at the stage '{stage.value}'")

    def _received(self, now: _Round, replies: Iterable[Message], names: bool = False) -> None:
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                now.trouble.append(f"node {node}: {reply.error.reason}")
                continue
            try:
                client = now.server.receive(_bytes(_record(reply.content)["content"]))
            except (SecureError, FlowerError, KeyError) as problem:
                now.trouble.append(f"node {node}: {problem}")
                continue
            if names:
                now.nodes[client] = node

    def _without(self, now: _Round, problem: SecureError) -> list[Message]:
        now.trouble.append(str(problem))
        log(WARNING, "Secure aggregation: no sum in round %s. %s", now.plan.round, problem)
        return []

    def _request(self, now: _Round, stage: Stage, content: bytes) -> ConfigRecord:
        return ConfigRecord({"stage": stage.name, "session": self.session, "round": now.plan.round, "content": content})


def _record(content: RecordDict) -> ConfigRecord:
    if RECORD not in content.config_records:
        raise FlowerError("This message does not belong to secure aggregation: the other side must use it too.")
    return content.config_records[RECORD]


def _reply(message: Message, content: bytes) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord({"content": content})}), reply_to=message)


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise FlowerError(f"A message of secure aggregation holds {type(value).__name__} where bytes should be.")
    return value
