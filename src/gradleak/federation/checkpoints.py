"""The folder of a training: it survives being killed at any moment, and nothing that is read from it is executed.

training.toml                          the configuration, for people and for the check that a resumed run is the same
metrics.jsonl                          one line per round: see `training.train`
checkpoints/round-50.safetensors       what the server sends at round 50, that is after 50 rounds; beside it the average
                                       of models where there is one, which was never sent
state.safetensors                      the latest state: the same, and what clients and server remember; replaced as a
                                       whole
samples/round-50.png, samples.png      what a denoiser makes of fixed latents, where it was asked for: see `samples`
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
    """What the server sent at some rounds of a training that was kept in a folder."""

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
        """How many rounds the training has behind it."""
        path = self.folder / "state.safetensors"
        return int(_load(path)[0]["round"]) if path.exists() else 0

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl; a last line that was cut off is left out."""
        path = self.folder / "metrics.jsonl"
        try:
            return [json.loads(line) for line in whole_lines(path)]
        except ValueError as problem:
            raise FederationError(f"{path} cannot be read: {problem}.") from None

    def at(self, round: int) -> Snapshot:
        if round not in self.rounds:
            there = ", ".join(map(str, self.rounds)) or "none"
            raise FederationError(
                f"{self.folder} has no checkpoint of round {round}; there are: {there}. Train further with the same "
                f"command and more --rounds or, if the round has passed, again into another folder with --checkpoints."
            )
        header, held = _load(_path(self.folder, round))
        if header.get("round") != round:
            raise FederationError(f"{_path(self.folder, round)} says it is of round {header.get('round')!r}.")
        memories = {int(client): memory for client, memory in held.get("memories", {}).items()}
        return Snapshot(held.get("weights", {}), held.get("buffers", {}), memories, held.get("server", {}))

    @property
    def averaged(self) -> Snapshot | None:
        """The average of models (`swa.Averaging`), as it is now; it was never sent. None: there is none, or not yet."""
        path = self.folder / "state.safetensors"
        return _average(_load(path)[1]) if path.exists() else None

    def averaged_at(self, round: int) -> Snapshot | None:
        """The same as it was at a round that was kept."""
        self.at(round)
        return _average(_load(_path(self.folder, round))[1])

    def fingerprint(self, rounds: Sequence[int]) -> str:
        """A hash of what was sent at these rounds."""
        sent = {str(number): self.at(number) for number in sorted(set(rounds))}
        memories = {number: {str(c): m for c, m in each.memories.items()} for number, each in sent.items()}
        kept = {number: [each.server] if each.server else [] for number, each in sent.items()}
        return digest(
            {number: [each.weights, each.buffers, memories[number], *kept[number]] for number, each in sent.items()}
        )


class TrainingFolder(ResumableFolder):
    """The writing side."""

    work = "training"
    config = "training.toml"
    free = ("gradleak", "origin.")

    def open(self, settings: dict[str, Any], toml: str) -> State | None:
        """Make the folder ready: new, or holding the same training. Returns the state to go on from, if any."""
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
        """Make this the state that a later run goes on from."""
        save_state(self.path / "state.safetensors", {"round": state.round}, _held(state))

    def checkpoint(self, state: State) -> None:
        """What was sent, and kept, at a round."""
        save_state(_path(self.path, state.round), {"round": state.round}, _held(state))

    def _state(self) -> State | None:
        path = self.path / "state.safetensors"
        if not path.exists():
            return None
        header, held = _load(path)
        memories = {int(client): flat(memory) for client, memory in held.get("memories", {}).items()}
        server, average = flat(held.get("server", {})), flat(held.get("average", {}))
        return State(int(header["round"]), held.get("weights", {}), held.get("buffers", {}), memories, server, average)

    def metrics(self, until: int) -> list[dict[str, Any]]:
        """The lines of the first rounds; what comes after the state that was kept comes again."""
        return self.trimmed("metrics.jsonl", lambda row: row["round"] <= until)

    def add(self, row: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self.append("metrics.jsonl", [row])


def recipe(training: LocalTraining) -> dict[str, Any]:
    """The client's recipe as plain values; rules beyond plain SGD only as text, for people."""
    return {
        "lr": float(training.lr),
        **{name: getattr(training, name) for name in ("steps", "epochs", "batch_size", "dropout")},
        **{name: text(getattr(training, name)) for name in ("optimiser", "schedule", "augmentation")},
    }


def text(value: Any) -> str | None:
    """A part by its name, else as it describes itself."""
    return None if value is None else getattr(value, "__name__", None) or repr(value)


# --- files -----------------------------------------------------------------------------------------------------------


def _held(state: State) -> Mapping[str, Tensor]:
    sent = state.snapshot
    memories = {str(client): memory for client, memory in sent.memories.items()}
    kept = {"server": dict(sent.server), "average": unflat(state.average)}
    return flat({"weights": sent.weights, "buffers": sent.buffers, "memories": memories, **kept})


def _average(held: Tree) -> Snapshot | None:
    found = held.get("average", {})
    return Snapshot(found["weights"], found.get("buffers", {})) if found else None


def _path(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"round-{round}.safetensors"


def _rounds(folder: Path) -> list[int]:
    names = (re.fullmatch(r"round-(\d+)\.safetensors", path.name) for path in folder.glob("checkpoints/*"))
    return sorted(int(found[1]) for found in names if found)


def _load(path: Path) -> tuple[dict[str, Any], Tree]:
    header, held = load_state(path, FederationError)
    return header, unflat(held)
