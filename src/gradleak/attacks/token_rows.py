"""Token rows: the rows of an embedding that an update changes are the tokens of the client's texts."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from gradleak.attack import ReadOff, Reconstruction, require, scenes_of, supported
from gradleak.core.listeners import Share
from gradleak.core.registry import named
from gradleak.engine import Engine
from gradleak.parts.embeddings import bag_of, unread
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.view import in_turn
from gradleak.scenario.observation import Knowledge, Seen, as_targets
from gradleak.scenario.task import Task


@named(
    "token-rows",
    kind="attack",
    paper="Melis, Song, De Cristofaro, Shmatikov, Exploiting Unintended Feature Leakage, S&P 2019, section 4.1",
)
@dataclass(frozen=True)
class TokenRows(ReadOff):
    """Read the bag of tokens off the embedding: a row is zero where its token does not appear (`parts.embeddings`).

    The order of the tokens, how often each appears and which example of a batch has which are not read: places are
    filled by length of the row, example after example, and the rest is -1. Tokens of the padding are public and left
    out. Categorical columns with an embedding each are read column by column, exactly for one example.
    """

    @property
    def name(self) -> str:
        return "token-rows"

    @property
    def work(self) -> int | None:
        return 0

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        if not task.fields["x"].kind.embedded:
            return f"it reads ids that a model embeds, and x holds {task.fields['x'].kind.noun[1]}"
        return unread(task, "x")

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """Read every target. `match` is the share of the embedding's gradient in rows that were not named."""
        supported(self, task, knows)
        require(self, knows)
        targets, began, engine = as_targets(seen), time.perf_counter(), engine or Engine()
        with engine.settings():
            work = task.to(engine.where, engine.dtype)
            scenes = scenes_of(work, targets, knows, Labels(label_rule(self.labels)))
            read = [bag_of(scene, "x") for scene in in_turn(scenes)]
        if progress is not None:
            progress(1.0)
        batches = [{**scene.fields, "x": ids} for scene, (ids, _) in zip(scenes, read, strict=True)]
        result = self.answer(task, targets, batches, [rest for _, rest in read])
        return replace(result, seconds=time.perf_counter() - began, settings={**result.settings, "seed": seed})
