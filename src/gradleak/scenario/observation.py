"""What the server sees (`Observation`, `Track`) and what else the adversary is granted (`Knowledge`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.files import replacing
from gradleak.core.tree import Params
from gradleak.scenario.task import Batch

if TYPE_CHECKING:
    from gradleak.scenario.client import LocalTraining
    from gradleak.scenario.defence import Defence

FORMAT, VERSION = "gradleak.observation", 1
MOST = 10**9  # of examples, rounds or clients; a file with more is damaged or malicious
_GROUPS = ("weights", "update", "buffers", "returned_buffers")  # tensor names in a file start with one, or "extras"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # torch has no arithmetic for smaller ones


class BadObservation(ValueError):
    """An observation that cannot be what a server saw: wrong names or shapes, not finite, or a broken file."""


@dataclass(frozen=True, eq=False)
class Observation:
    """One client's (or one round's aggregated) upload, as the server sees it. No field can hold private data.

    `update` = weights sent minus weights returned: it points along +gradient, scaled by the client's learning rate.
    `key` names the target and seeds its lanes. `extras` is what else the server itself broadcast this round.
    """

    weights: Params
    update: Params
    num_examples: int
    round: int = 0
    clients: int = 1
    key: str = "target"
    buffers: Params | None = None
    returned_buffers: Params | None = None
    extras: dict[str, Params] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("num_examples", 1), ("round", 0), ("clients", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
                raise BadObservation(f"{name} must be a whole number from {least} to {MOST}; given {value!r}.")
        if not isinstance(self.key, str):
            raise BadObservation(f"key must be text; given {type(self.key).__name__}.")
        if self.key.encode("utf-8", "replace").decode() != self.key:
            raise BadObservation(f"key must be text that can be written; given {self.key!a}, half a surrogate pair.")
        if not self.weights:
            raise BadObservation("weights are empty: give the model that was sent to the client, by parameter name.")
        _same_names_and_shapes(self.weights, self.update)
        groups = {group: getattr(self, group) or {} for group in _GROUPS}
        for name, params in (groups | {f"extras {extra}": params for extra, params in self.extras.items()}).items():
            broken = [key for key, value in params.items() if not tree.finite({key: value})]
            if broken:
                raise BadObservation(
                    f"{name} holds NaN or infinity in {_some(broken)}: the client's training diverged or the recording "
                    "is damaged. Nothing can be inferred from it; record another round."
                )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a safetensors file with a JSON header. It holds no code, but it is sensitive: it may reveal data."""
        from safetensors.torch import save_file

        tensors: Params = {}
        for group in _GROUPS:
            tensors |= {f"{group}/{name}": value for name, value in (getattr(self, group) or {}).items()}
        for extra, params in self.extras.items():
            tensors |= {f"extras/{extra}/{name}": value for name, value in params.items()}
        header = {"num_examples": self.num_examples, "round": self.round, "clients": self.clients, "key": self.key}
        path = Path(path)
        with replacing(path, private=True) as partial:  # it may reveal the client's examples
            save_file(
                {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()},
                partial,
                metadata={"format": FORMAT, "version": str(VERSION), "observation": json.dumps(header)},
            )
            partial.chmod(0o600)  # also where the writer made a file of its own
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Observation:
        """Read and validate a file written by `save`. Nothing in the file is executed."""
        header, tensors = _read(Path(path))
        groups: dict[str, Params] = {group: {} for group in _GROUPS}
        extras: dict[str, Params] = {}
        for name, value in tensors.items():
            group, _, rest = name.partition("/")
            if group in groups and rest:
                groups[group][rest] = value
            elif group == "extras" and "/" in rest:
                extra, _, inner = rest.partition("/")
                extras.setdefault(extra, {})[inner] = value
            else:
                raise BadObservation(f"{path}: tensor {name!r} belongs to none of {', '.join(_GROUPS)}, extras.")
        unknown = header.keys() - {"num_examples", "round", "clients", "key"}
        if unknown or "num_examples" not in header:
            what = f"unknown entries {_some(unknown)}" if unknown else "no num_examples"
            raise BadObservation(f"{path}: the header has {what}; it was not written by this version of gradleak.")
        try:
            return Observation(
                weights=groups["weights"],
                update=groups["update"],
                buffers=groups["buffers"] or None,
                returned_buffers=groups["returned_buffers"] or None,
                extras=extras,
                **header,
            )
        except BadObservation as problem:
            raise BadObservation(f"{path}: {problem}") from None
        except RuntimeError as problem:  # such as 70 axes
            raise BadObservation(f"{path} holds tensors that torch cannot compute with: {problem}.") from None


@dataclass(frozen=True, eq=False)
class Track:
    """Several rounds of ONE client, oldest first, with the same examples in each: noise averages out.

    A track is one target, named by its last round. A list of observations is several targets.
    """

    observations: tuple[Observation, ...]

    def __post_init__(self) -> None:
        if not self.observations:
            raise BadObservation("A track needs at least one observation.")
        rounds = [each.round for each in self.observations]
        if rounds != sorted(set(rounds)):
            raise BadObservation(f"A track's rounds must increase; given {rounds}.")
        if len(sizes := {each.num_examples for each in self.observations}) > 1:
            raise BadObservation(
                f"A track is of one client that trained on the same examples each time; given {sorted(sizes)} of them."
            )
        for each in self.observations[1:]:
            _same_names_and_shapes(self.last.weights, each.update)

    @property
    def last(self) -> Observation:
        """The latest round."""
        return self.observations[-1]

    @property
    def key(self) -> str:
        """The target's name: that of the latest round."""
        return self.last.key

    @property
    def num_examples(self) -> int:
        """The number of the client's examples, equal in every round."""
        return self.last.num_examples

    @property
    def equations(self) -> int:
        """The number of observed values, over all rounds."""
        return sum(tree.size(each.update) for each in self.observations)

    def one_by_one(self) -> list[Track]:
        """Each example as a target of its own with the update of all, for attacks that search for one at a time."""

        def one(observation: Observation, example: int) -> Observation:
            key = observation.key if observation.num_examples == 1 else f"{observation.key}, example {example}"
            return replace(observation, num_examples=1, key=key)

        return [Track(tuple(one(each, example) for each in self.observations)) for example in range(self.num_examples)]


Seen: TypeAlias = "Observation | Track | Sequence[Observation | Track]"
"""What an attack is given: one target, or several independent ones."""


@dataclass(frozen=True)
class Level:
    """A threat model of Carletti et al., SoK: Gradient Inversion Attacks in FL, USENIX Security 2025.

    `grants`: the fields of `Knowledge` that the level may have; each level has all of the one before. `adds`: the new
    ones.
    """

    letter: str
    name: str
    grants: tuple[str, ...]
    adds: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.letter} ({self.name})"


LEVELS = {
    level.letter: level
    for level in (
        Level("A", "eavesdropper", (), (), "Reads the messages. Attacked as B, which is stronger: a bound from above."),
        Level("B", "basic knowledge", (), (), "Knows the model, the loss, and how many examples there were."),
        Level(
            "C", "training details", ("training", "defence", "y"), ("training", "defence"),
            "Also knows the client's recipe and defence.",
        ),
        Level(
            "D", "surrogate data", ("training", "defence", "y", "public"), ("public",),
            "Also has public data that resemble the clients'.",
        ),
        Level(
            "E", "client distribution", ("training", "defence", "y", "public", "generator", "given"),
            ("generator", "given"),
            "Also has a generator of such data, or fields of the private batch other than labels.",
        ),
    )
}  # fmt: skip
ACTIVE = {
    "F": "an active server changes the model that it sends, so that gradients give single examples away",
    "G": "an active server with data of its own prepares the model on them before it sends it",
    "H": "an active server picks or isolates clients, and so undoes what an aggregate hides",
}
"""Out of scope: such a server does not observe honest rounds, so no result here applies to it."""


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The threat model: what the adversary is granted besides the observation.

    `given`: known fields, such as labels. `training`: the client's recipe. `defence`: the defence in use, so that the
    attack predicts through it. `generator`, `public`: a prior and data of the attacker's own. `inputs`: names of given
    fields that are public inputs of the model (`Field.public`): every server knows them.
    """

    given: Batch = field(default_factory=dict)
    training: LocalTraining | None = None
    defence: Defence | None = None
    generator: Any = None
    public: Any = None
    inputs: frozenset[str] = frozenset()

    @staticmethod
    def at(level: str, **granted: Any) -> Knowledge:
        """The knowledge of an adversary of this level (A to E): `Knowledge.at("C", training=..., defence=...)`.

        More than the level grants is an error, and so is a level without what it adds. F to H are refused.
        """
        letter = level.strip().upper()[:1]
        if letter in ACTIVE:
            raise ValueError(
                f"Level {letter} is out of scope: {ACTIVE[letter]}. gradleak audits passive servers, levels A to E; a "
                "good result says nothing about active ones."
            )
        if letter not in LEVELS:
            raise ValueError(f"There is no level {level!r}: levels are {', '.join(map(str, LEVELS.values()))}.")
        requested, knowledge = LEVELS[letter], Knowledge(**granted)
        names = knowledge.grants - knowledge.given.keys() | ({"y"} & knowledge.given.keys())
        names |= {"given"} if knowledge.given.keys() - {"y"} - knowledge.inputs else frozenset()
        if beyond := sorted(names - set(requested.grants)):
            raise ValueError(
                f"Level {requested} does not grant {', '.join(beyond)}. What was given is level {knowledge.level}."
            )
        if requested.adds and not names & set(requested.adds):
            needed = " or ".join(requested.adds)
            raise ValueError(f"Level {requested} needs {needed}; without it the level is {knowledge.level}.")
        return knowledge

    def without(self, *capabilities: str) -> Knowledge:
        """The same adversary without these: "labels", "recipe", "defence", "generator", "public"."""
        removal: dict[str, Any] = {"recipe": {"training": None}}
        removal |= {name: {name: None} for name in ("defence", "generator", "public")}
        removal["labels"] = {"given": {name: value for name, value in self.given.items() if name != "y"}}
        changed = self
        for name in capabilities:
            if name not in removal:
                raise ValueError(f"{name!r} is not a capability: there are {', '.join(sorted(removal))}.")
            changed = replace(changed, **removal[name])
        return changed

    @property
    def grants(self) -> frozenset[str]:
        """The names of what is known, as `Attack.needs` uses them."""
        named = {"training": self.training, "defence": self.defence, "generator": self.generator, "public": self.public}
        return frozenset({name for name, value in named.items() if value is not None} | self.given.keys())

    @property
    def level(self) -> str:
        """The nearest model of Carletti et al. (USENIX Security 2025); F-H are active servers and out of scope."""
        if self.given.keys() - {"y"} - self.inputs or self.generator is not None:
            return str(LEVELS["E"])
        if self.public is not None:
            return str(LEVELS["D"])
        if self.training is not None or self.defence is not None:
            return str(LEVELS["C"])
        return str(LEVELS["B"])


class MissingKnowledge(ValueError):
    """An attack that needs something the threat model does not grant."""


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _same_names_and_shapes(weights: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> None:
    if odd := weights.keys() ^ update.keys():
        raise BadObservation(
            f"weights and update name different parameters: {_some(odd)}. Both must be keyed by the same names."
        )
    for name in weights:
        if weights[name].shape != update[name].shape:
            raise BadObservation(
                f"{name!r} has shape {tuple(weights[name].shape)} in weights and {tuple(update[name].shape)} in update."
            )
        for value in (weights[name], update[name]):
            if value.dtype not in _FLOATS:
                raise BadObservation(
                    f"{name!r} is {value.dtype}, not floating point of 16, 32 or 64 bits; integer tensors belong into "
                    "buffers, and compressed ones are unpacked first."
                )


def _read(path: Path) -> tuple[dict[str, Any], Params]:
    """The header and the tensors of a file from outside; every defect becomes one BadObservation."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise BadObservation(
                    f"{path} is a safetensors file but not an observation (format {metadata.get('format')!r}); "
                    "write it with Observation.save."
                )
            if metadata.get("version") != str(VERSION):
                raise BadObservation(f"{path} has version {metadata.get('version')!r}; this gradleak reads {VERSION}.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        header = json.loads(metadata.get("observation", "null"))
    except FileNotFoundError:
        raise BadObservation(f"There is no file {path}.") from None
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as problem:
        if isinstance(problem, BadObservation):
            raise
        raise BadObservation(
            f"{path} is not a readable observation ({type(problem).__name__}: {problem}). It may be cut off or "
            "damaged; copy it again, or record it anew with Observation.save."
        ) from None
    if not isinstance(header, dict):
        raise BadObservation(f"{path}: the header holds {type(header).__name__}, not an object with num_examples.")
    return header, tensors


def as_targets(seen: Seen) -> list[Track]:
    """One target or several independent ones, each as a track, with unequal keys. An observation is a track of one."""
    several = [seen] if isinstance(seen, Observation | Track) else list(seen)
    targets = [each if isinstance(each, Track) else Track((each,)) for each in several]
    if not targets:
        raise BadObservation("There is no observation to attack.")
    keys = [target.key for target in targets]
    if len(set(keys)) < len(keys):
        twice = {key for key in keys if keys.count(key) > 1}
        raise BadObservation(
            f"Targets share a key ({_some(twice)}), so their lanes would draw the same numbers; rename them."
        )
    return targets


def stack(values: Sequence[Params]) -> Params:
    """Several trees of the same names as one, with a new first axis."""
    return {name: torch.stack([value[name] for value in values]) for name in values[0]}
