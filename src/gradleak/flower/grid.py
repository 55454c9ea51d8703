"""A Flower grid without processes: the same ClientApp, mods and strategy in one Python, for tests and notebooks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from gradleak.flower.records import identify

RUN = 1


class InProcess(Grid):
    """Every node answers at once, one after the other; each has its own state, which lasts from round to round.

    nodes        how many, or the node_config of each; a number gives them partition-id and num-partitions
    unreachable  nodes that never answer, as after a crash
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int | Sequence[Mapping[str, Any]],
        *,
        run_config: Mapping[str, Any] | None = None,
        unreachable: Iterable[int] = (),
    ) -> None:
        identify(RUN)
        count = nodes if isinstance(nodes, int) else len(nodes)
        configs = (
            [{"partition-id": index, "num-partitions": count} for index in range(count)]
            if isinstance(nodes, int)
            else [dict(node) for node in nodes]
        )
        self.app, self.unreachable = app, set(unreachable)
        self.contexts = {
            number: Context(RUN, number, config, RecordDict(), dict(run_config or {}))
            for number, config in enumerate(configs, start=1)
        }
        self._replies: dict[str, Message] = {}
        self._sent = 0

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError("A grid inside one process belongs to no run.")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            self._sent += 1
            names.append(str(self._sent))
            node = message.metadata.dst_node_id
            if node not in self.unreachable:
                self._replies[names[-1]] = self._answer(copy.deepcopy(message), self.contexts[node])
        return names

    def _answer(self, message: Message, context: Context) -> Message:
        try:
            return copy.deepcopy(self.app(message, context))
        except Exception as problem:  # as a SuperNode does: an error in client code becomes a reply
            code, reason = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(problem).__name__}: {problem}"
            return Message(Error(code=code, reason=reason), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
