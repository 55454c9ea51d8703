"""The folder of a training. It survives a kill at any moment, and nothing read from it is executed.

training.toml                          the configuration, for people and for the check that a resumed run is the same
metrics.jsonl                          one line per round: see `training.train`
checkpoints/round-50.safetensors       what the server sends after 50 rounds, and the average of models if there is one
state.safetensors                      the latest state, with what clients and server remember; replaced as a whole
samples/round-50.png, samples.png      images from fixed latents, if requested: see `samples`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from gradleak.core.configuration import digest, from_toml
from gradleak.core.files import load_state, save_state, whole_lines
from gradleak.core.folder import ResumableFolder
from gradleak.core.tree import Tree
from gradleak.federation.clients import flat, unflat
from gradleak.federation.partition import FederationError
from gradleak.federation.rounds import Snapshot, State
from gradleak.scenario.client import LocalTraining

VERSION = 1


@dataclass(frozen=True)
class Checkpoints:
    """What the server sent at some rounds of a training that was saved in a folder."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not (self.folder / "training.toml").is_file():
            raise FederationError(f"{self.folder} holds no training: there is no training.toml in it.")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """training.toml."""
        try:
            return from_toml((self.folder / "training.toml").read_text(encoding="utf-8"))
        except ValueError as problem:
            raise FederationError(f"{self.folder / 'training.toml'} cannot be read: {problem}.") from None

    @property
    def rounds(self) -> list[int]:
        """The rounds there are checkpoints of."""
        return _rounds(self.folder)

    @property
    def done(self) -> int:
        """Number of finished rounds."""
        path = self.folder / "state.safetensors"
        return int(_load(path)[0]["round"]) if path.exists() else 0

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl, without a last line that was cut off."""
        path = self.folder / "metrics.jsonl"
        try:
            return [json.loads(line) for line in whole_lines(path)]
        except ValueError as problem:
            raise FederationError(f"{path} cannot be read: {problem}.") from None

    def at(self, round: int) -> Snapshot:
        """What the server sent at this checkpoint."""
        if round not in self.rounds:
            existing = ", ".join(map(str, self.rounds)) or "none"
            raise FederationError(
                f"{self.folder} has no checkpoint of round {round}; there are: {existing}. Train further with the same "
                f"command and more --rounds or, if the round has passed, again into another folder with --checkpoints."
            )
        header, saved = _load(_path(self.folder, round))
        if header.get("round") != round:
            raise FederationError(f"{_path(self.folder, round)} says it is of round {header.get('round')!r}.")
        memories = {int(client): memory for client, memory in saved.get("memories", {}).items()}
        return Snapshot(saved.get("weights", {}), saved.get("buffers", {}), memories, saved.get("server", {}))

    @property
    def averaged(self) -> Snapshot | None:
        """The latest average of models (`swa.Averaging`), which was never sent. None: there is none, or not yet."""
        path = self.folder / "state.safetensors"
        return _average(_load(path)[1]) if path.exists() else None

    def averaged_at(self, round: int) -> Snapshot | None:
        """The average of models at this checkpoint."""
        self.at(round)
        return _average(_load(_path(self.folder, round))[1])

    def fingerprint(self, rounds: Sequence[int]) -> str:
        """A hash of what was sent at these rounds."""
        sent = {str(number): self.at(number) for number in sorted(set(rounds))}
        memories = {number: {str(c): m for c, m in each.memories.items()} for number, each in sent.items()}
        servers = {number: [each.server] if each.server else [] for number, each in sent.items()}
        return digest(
            {number: [each.weights, each.buffers, memories[number], *servers[number]] for number, each in sent.items()}
        )


class TrainingFolder(ResumableFolder):
    """The writing side."""

    work = "training"
    config = "training.toml"
    free = ("gradleak", "origin.")

    def open(self, settings: dict[str, Any], toml: str) -> State | None:
        """Lock a folder that is new or holds the same training. Returns the state to continue from, if any."""
        self.lock()
        try:
            if not self.holds(settings):
                self.demand_empty()
            (self.path / "checkpoints").mkdir(exist_ok=True)
            self.write("training.toml", toml)
            return self._state()
        except BaseException:
            self.close()
            raise

    @property
    def checkpoints(self) -> list[int]:
        return _rounds(self.path)

    def keep(self, state: State) -> None:
        """Save this as the state that a later run continues from."""
        save_state(self.path / "state.safetensors", {"round": state.round}, _tensors(state))

    def checkpoint(self, state: State) -> None:
        """Save what was sent and remembered at a round."""
        save_state(_path(self.path, state.round), {"round": state.round}, _tensors(state))

    def _state(self) -> State | None:
        path = self.path / "state.safetensors"
        if not path.exists():
            return None
        header, saved = _load(path)
        memories = {int(client): flat(memory) for client, memory in saved.get("memories", {}).items()}
        server, average = flat(saved.get("server", {})), flat(saved.get("average", {}))
        return State(
            int(header["round"]), saved.get("weights", {}), saved.get("buffers", {}), memories, server, average
        )

    def metrics(self, until: int) -> list[dict[str, Any]]:
        """The lines up to this round; later ones are cut off, since those rounds run again."""
        return self.trimmed("metrics.jsonl", lambda row: row["round"] <= until)

    def add(self, row: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self.append("metrics.jsonl", [row])


def recipe(training: LocalTraining) -> dict[str, Any]:
    """The client's recipe as plain values; optimiser, schedule and augmentation only as text for people."""
    return {
        "lr": float(training.lr),
        **{name: getattr(training, name) for name in ("steps", "epochs", "batch_size", "dropout")},
        **{name: text(getattr(training, name)) for name in ("optimiser", "schedule", "augmentation")},
    }


def text(value: Any) -> str | None:
    """The name of a part, or its repr."""
    return None if value is None else getattr(value, "__name__", None) or repr(value)


# --- files -----------------------------------------------------------------------------------------------------------


def _tensors(state: State) -> Mapping[str, Tensor]:
    sent = state.snapshot
    memories = {str(client): memory for client, memory in sent.memories.items()}
    unsent = {"memories": memories, "server": dict(sent.server), "average": unflat(state.average)}
    return flat({"weights": sent.weights, "buffers": sent.buffers, **unsent})


def _average(saved: Tree) -> Snapshot | None:
    average = saved.get("average", {})
    return Snapshot(average["weights"], average.get("buffers", {})) if average else None


def _path(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"round-{round}.safetensors"


def _rounds(folder: Path) -> list[int]:
    names = (re.fullmatch(r"round-(\d+)\.safetensors", path.name) for path in folder.glob("checkpoints/*"))
    return sorted(int(match[1]) for match in names if match)


def _load(path: Path) -> tuple[dict[str, Any], Tree]:
    header, tensors = load_state(path, FederationError)
    return header, unflat(tensors)
