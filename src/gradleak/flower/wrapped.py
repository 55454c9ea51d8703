"""A strategy around another one: everything it does not change comes from the inner one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy


class Wrapped(Strategy):
    """Passes on evaluation, summary and all attributes of the inner `strategy`; subclasses define the training."""

    strategy: Any

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not set yet, during unpickling
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def summary(self) -> None:
        self.strategy.summary()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages: Iterable[Message] = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        metrics: MetricRecord | None = self.strategy.aggregate_evaluate(server_round, replies)
        return metrics
