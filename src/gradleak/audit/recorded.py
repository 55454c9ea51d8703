"""An audit of recorded observations of a real training (`flower.Tap`, `Observation.save`, adapters).

If the auditor has the examples that some clients trained on (canaries), `RecordedAudit` gives the same rows, table,
verdict and report as any audit. Without them, `blind` gives objective, certificate, checks, inferred labels and
pictures. Nobody knows then how close a reconstruction is, so none of it says that a client is safe.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gradleak.adapters import fitted, read_npz
from gradleak.attack import require
from gradleak.attack.checks import observation_checks
from gradleak.audit.cells import FORMS, Cell, forms_of, named_attacks, named_defences
from gradleak.audit.grid import Audit
from gradleak.audit.private import AuditError, PrivateSide, Victims, examples_of
from gradleak.core import tree
from gradleak.core.configuration import digest
from gradleak.core.files import finite, replace_whole
from gradleak.core.listeners import Silent
from gradleak.engine import Engine
from gradleak.federation import Federation, Snapshot, with_buffers
from gradleak.identify import ReplayError, replay_error, rounding_of
from gradleak.scenario.defence import Defence
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.kinds import KINDS, Mask, Tokens
from gradleak.scenario.objectives import ModelLoss
from gradleak.scenario.observation import BadObservation, Knowledge, Observation, stack
from gradleak.scenario.task import Batch, Objective, Task

if TYPE_CHECKING:
    from gradleak.attack import Attack, Reconstruction
    from gradleak.core.listeners import Progress
    from gradleak.scenario.client import LocalTraining

SAME = 1e-4  # relative error of a replay that is rounding, for a client that computes in float32
NEARLY = 0.1  # up to here unknown noise or augmentation may explain the error
SHUFFLED = 0.5  # the same if a client shuffles its examples into batches: another order is another update
SUFFIXES = (".safetensors", ".npz")


# --- what is in the folders -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recorded:
    """One observation under the name of its file, and the examples behind it, if known."""

    name: str
    seen: Observation
    truth: Batch | None = None


def read(
    folder: str | os.PathLike[str], task: Task, truth: str | os.PathLike[str] | None = None, rounds: Iterable[int] = ()
) -> list[Recorded]:
    """All observations of a folder (or one file), named as the task names its tensors; of these rounds, or of all.

    `truth`: a folder with files of the same names (.safetensors or .npz) that hold the fields of the task, in
    model-input space. An observation without such a file has no truth.
    """
    home, chosen = Path(folder), set(rounds)
    paths = [home] if home.is_file() else sorted(home.glob("*.safetensors"))
    if not paths:
        raise AuditError(f"{home} holds no observations: there is no *.safetensors in it.")
    if truth is not None and not Path(truth).is_dir():
        raise AuditError(f"There is no folder {truth} with the examples of the clients.")
    recorded: list[Recorded] = []
    for path in paths:
        observation = fitted(Observation.load(path), task)
        if chosen and observation.round not in chosen:
            continue
        observation = replace(observation, key=path.stem)  # a file name is unique, and so must a key be
        batch = None if truth is None else _truth(Path(truth), path.stem, observation, task)
        recorded.append(Recorded(path.stem, observation, batch))
    if not recorded:
        raise AuditError(f"{home} holds {len(paths)} observations, none of them of round {sorted(chosen)}.")
    return recorded


def _truth(folder: Path, stem: str, observation: Observation, task: Task) -> Batch | None:
    path = next((folder / (stem + suffix) for suffix in SUFFIXES if (folder / (stem + suffix)).exists()), None)
    if path is None:
        return None
    own = task.own_names  # canaries may keep what their loader gave: input_ids, attention_mask, labels
    batch = {own.get(name, name): value for name, value in _tensors(path).items()}
    needed = set(task.fields) - task.drawn
    if missing := sorted(needed - batch.keys()):
        raise AuditError(f"{path} lacks {', '.join(missing)}: it should hold {', '.join(sorted(needed))}.")
    batch = {name: value for name, value in batch.items() if name in task.fields}
    if any(len(value) != observation.num_examples for value in batch.values()):
        counts = {name: len(value) for name, value in batch.items()}
        raise AuditError(f"{path} holds {counts} examples; the client said it trained on {observation.num_examples}.")
    return batch


def _tensors(path: Path) -> Batch:
    if path.suffix == ".npz":
        try:
            return {name: torch.from_numpy(value) for name, value in read_npz(path).items()}
        except BadObservation as problem:
            raise AuditError(str(problem)) from None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as problem:
        raise AuditError(f"{path} cannot be read ({type(problem).__name__}: {problem}).") from None


def privacy_of(folder: str | os.PathLike[str]) -> list[str]:
    """What the recording says of the privacy wrappers of its strategy; empty if there were none."""
    path = Path(folder) / "recording.json"
    if not path.is_file():
        return []
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
        return [f"{one['wrapper']}: {one['says']}. {one['guarantee']['text']}" for one in recording["privacy"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise AuditError(f"{path} is not a recording's description: {problem}.") from None


# --- does the stated recipe reproduce the update? ---------------------------------------------------------------------


def replays(
    task: Task, recorded: Sequence[Recorded], training: LocalTraining, defence: Defence | None = None
) -> dict[str, ReplayError]:
    """What a replay of the recipe leaves unexplained, for every observation whose examples are known."""
    return {
        one.name: replay_error(task, one.seen, one.truth, training, defence=defence)
        for one in recorded
        if one.truth is not None
    }


def reproduced(error: ReplayError, seen: Observation, training: LocalTraining) -> str:
    """ "yes" up to rounding; "nearly" if an unknown order of batches, noise or augmentation may explain the rest."""
    if error.relative <= max(SAME, 10 * rounding_of(seen).whole):
        return "yes"
    shuffled = any(rows is not None for rows in training.order(seen.num_examples))
    return "nearly" if error.relative <= (SHUFFLED if shuffled else NEARLY) else "no"


def replay_text(errors: Mapping[str, ReplayError], recorded: Sequence[Recorded], training: LocalTraining) -> str:
    """The replay check in words, with what to do if it fails."""
    if not errors:
        return "Replay check: no examples are known, so the recipe was not replayed."
    observations = {one.name: one.seen for one in recorded}
    words = [reproduced(error, observations[name], training) for name, error in errors.items()]
    yes, no = words.count("yes"), words.count("no")
    worst = max(errors, key=lambda name: errors[name].relative)
    lines = [f"Replay check: the stated recipe reproduces {yes} of {len(words)} updates; worst: {errors[worst]}."]
    if no:
        scale = errors[worst].total.scale
        hint = f" An update {1 / scale:.2g} times as long as the replay's hints at another learning rate." * (
            abs(errors[worst].cosine) > 0.99 and not 0.9 < scale < 1.1
        )
        lines.append(
            f"{no} are not reproduced ({worst} worst): recipe, defence or examples are not as stated, and attacks that "
            f"rely on them will fall short.{hint}"
        )
    elif yes < len(words):
        lines.append("The rest nearly: only the client knows the order of batches, noise, dropout or augmentation.")
    return " ".join(lines)


@dataclass(frozen=True)
class Replay:
    """The replay check as an analysis of an audit: numbers beside the scores of every target."""

    training: LocalTraining
    defence: Defence | None = None

    def __call__(self, task: Task, seen: Observation, truth: Batch) -> Mapping[str, float]:
        error = replay_error(task, seen, truth, self.training, defence=self.defence)
        return {"replay_error": error.relative, "replay_cosine": error.cosine, "replay_scale": error.total.scale}


# --- with the truth: an audit -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedClients(Federation):
    """The clients of one group: recorded in one round, with the same number of examples. `group` is its name."""

    group: str = ""


@dataclass(frozen=True, eq=False)
class RecordedSide(PrivateSide):
    """The private side of clients that have uploaded already: it simulates only the control and the baseline."""

    groups: Mapping[str, Sequence[Recorded]] = field(default_factory=dict)

    def count(self, federation: Federation) -> int:
        return len(self.groups[federation.group]) if isinstance(federation, RecordedClients) else self.targets

    def truth(self, federation: Federation) -> Batch:
        if not isinstance(federation, RecordedClients):
            return super().truth(federation)
        like = tree.like(self.task.weights())
        examples = [examples_of(one.truth, self.task, one.name) for one in self.groups[federation.group]]
        batches = [each.batch(torch.arange(len(each))) for each in examples]
        return stack([{name: value.to(like.device) for name, value in batch.items()} for batch in batches])

    def rest(self, federations: Iterable[Federation]) -> Tensor:
        plain = [federation for federation in federations if not isinstance(federation, RecordedClients)]
        return super().rest(plain) if plain else torch.empty(0, dtype=torch.long)  # all data are some client's

    def victims(
        self,
        federation: Federation,
        defence: Defence | None,
        round: int,
        rounds: tuple[int, ...],
        seed: int,
        repeats: int = 1,
    ) -> Victims:
        if not isinstance(federation, RecordedClients):
            return super().victims(federation, defence, round, rounds, seed, repeats)
        group, truth = self.groups[federation.group], self.truth(federation)
        others = self._unrelated(federation, truth)
        first = group[0].seen
        task = with_buffers(self.task, first.buffers or {})
        blind = [
            federation.observe(task, other, first.weights, defence, key=f"unrelated{i}", round=first.round, seed=seed)
            for i, other in enumerate(others)
        ]
        return Victims([one.seen for one in group], blind, truth, stack(others) if others else {})

    def guarantee(
        self, federation: Federation, defence: Defence, round: int, rounds: tuple[int, ...], repeats: int = 1
    ) -> Guarantee:
        """The guarantee for a client in all rounds up to the recorded one; its sampling is unknown."""
        proved = defence.guarantee(
            Exposure(rounds=max(1, round), examples=federation.examples or 1, training=federation.training)
        )
        stated = "stated by the auditor: whether the clients used it cannot be seen in a recording"
        return proved if proved.epsilon is None else replace(proved, caveats=(*proved.caveats, stated))

    def _snapshots(
        self, federation: Federation, defence: Defence | None, rounds: tuple[int, ...]
    ) -> dict[int, Snapshot]:
        if not isinstance(federation, RecordedClients):
            return super()._snapshots(federation, defence, rounds)
        observations = [one.seen for one in self.groups[federation.group]]
        return {one.round: Snapshot(one.weights, one.buffers or {}) for one in observations}


@dataclass(frozen=True, eq=False)
class RecordedAudit(Audit):
    """An audit whose targets were recorded; made by `RecordedAudit.of`.

    Every group of targets (one round, equally many examples) is attacked by every attack, in every form of the one
    stated defence. The positive control and the no-gradient baseline are simulated.
    """

    recorded: Sequence[Recorded] = ()

    @staticmethod
    def of(
        task: Task,
        recorded: Sequence[Recorded],
        attacks: Sequence[str | Attack],
        training: LocalTraining,
        gallery: Any,
        *,
        defence: str | Defence | None = None,
        engine: Engine | None = None,
        unrelated: int = 2,
    ) -> RecordedAudit:
        """The audit of the observations whose examples are known; `dataclasses.replace` sets what is not named here.

        training   the recipe that the clients followed, as far as is known
        gallery    real examples that are no client's, for re-identification and for the baseline
        defence    that the clients used
        """
        known = [one for one in recorded if one.truth is not None]
        if not known:
            raise AuditError("None of the observations has its examples beside it: name files as the observations are.")
        names = [name for name in task.fields if name not in task.drawn]
        data = {name: torch.cat([one.truth[name] for one in known if one.truth is not None]) for name in names}
        [(_, known_defence)] = named_defences([defence])
        groups = _grouped(known)
        return RecordedAudit(
            task,
            data,
            attacks,
            (defence,),
            federation=Federation(training=training, examples=1),
            rounds=tuple(sorted({one.seen.round for one in known})),
            targets=max(map(len, groups.values())),
            knowledge=FORMS[:-1],  # each client was recorded once, so nothing can be averaged
            repeats=1,
            engine=engine or Engine(),
            gallery=gallery,
            analyses=(Replay(training, known_defence),),
            unrelated=unrelated,
            origin={"observations": "given in Python"},
            recorded=tuple(known),
        )

    def cells(self) -> list[Cell]:
        [(against, defence)] = named_defences(self.defences)
        control = self._control()
        grid = [
            self._keyed(
                Cell(
                    *(attack, defence, form, group[0].seen.round, seed, self._clients(key, group), name, against),
                    given=self.granted,
                    inputs=self._inputs,
                    generator=self.generator,
                )
            )
            for form in forms_of(defence, self.knowledge)
            for name, attack in named_attacks(self.attacks)
            for key, group in _grouped(self.recorded).items()
            for seed in dict.fromkeys(self.seeds)
        ]
        return list({cell.key: cell for cell in (replace(control, control=True), *grid)}.values())

    def _clients(self, key: str, group: Sequence[Recorded]) -> RecordedClients:
        return RecordedClients(
            training=self.federation.training, examples=group[0].seen.num_examples, wire="weights", group=key
        )

    def _more_fingerprints(self) -> dict[str, str]:
        return {"observations": digest([_content(one.seen) for one in self.recorded])}

    def _side_of(self, parts: dict[str, Any]) -> PrivateSide:
        return RecordedSide(**parts, groups=_grouped(self.recorded))


def _grouped(recorded: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    groups: dict[str, list[Recorded]] = {}
    for one in sorted(recorded, key=lambda one: (one.seen.round, one.seen.num_examples, one.name)):
        groups.setdefault(f"round {one.seen.round}, {one.seen.num_examples} examples", []).append(one)
    return groups


def _content(observation: Observation) -> list[Any]:
    return [
        observation.key,
        observation.num_examples,
        observation.round,
        observation.weights,
        observation.update,
        observation.buffers or {},
    ]


# --- without the truth ------------------------------------------------------------------------------------------------

DETERMINED, EXPLAINED, PARTLY, INCONCLUSIVE = "determined", "explained", "in part", "inconclusive"
INCOMPLETE = "incomplete"
LEFT = 1e-2  # share of the match at the start; below, an update whose recipe cannot be replayed counts as explained
MEANING = {
    DETERMINED: "no other examples near the reconstruction explain the update",
    EXPLAINED: "the reconstruction explains the update; other examples may do so too",
    PARTLY: "the reconstruction explains part of the update; more steps or another attack may do better",
    INCOMPLETE: "places of the reconstruction have no value, as of tokens in no order, so it cannot be replayed",
    INCONCLUSIVE: "the attack did not converge, which says nothing about the client's safety",
}

UNKNOWN = "Without the examples nobody knows how close the {shown} are; nothing here says that a client is safe."


def blind(
    task: Task,
    recorded: Sequence[Recorded],
    attacks: Sequence[str | Attack],
    knows: Knowledge,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Attack all observations with all attacks, without any truth; write the findings into `out` and return them.

    A recording holds no masks of padding: where the model can be called without, attacks call it so (`unmasked`).
    findings.jsonl has one line per attack and observation: `word` (determined, explained, in part or inconclusive),
    objective, match, labels, checks, certificate and, if the recipe is known, how well it reproduces the update from
    the reconstruction. ATTACK/reconstruction.png shows it. Attacks that the folder already holds do not run again.
    """
    from gradleak.audit.output import write  # it draws pictures, which need Pillow

    home, progress = Path(out), progress or Silent()
    home.mkdir(parents=True, exist_ok=True)
    observations, methods = [one.seen for one in recorded], named_attacks(attacks)
    attacked, _ = unmasked(task)
    for _, attack in methods:
        require(attack, knows)
    setting = digest([[_content(one) for one in observations], digest(task), knows.training, knows.defence, seed])
    findings = _findings(home / "findings.jsonl")
    progress.start(len(methods))
    for index, (name, attack) in enumerate(methods):
        key = digest([setting, attack])
        if not any(row["run"] == key for row in findings):
            progress.cell(name, index)
            result = attack.run(attacked, observations, knows, seed=seed, engine=engine, progress=progress.share)
            written = write(result, home / name.replace(":", "-").replace(",", "-").replace("/", "-"))
            files = [str(path.relative_to(home)) for path in written]
            for target, one in enumerate(recorded):
                identity = {"run": key, "attack": name}
                findings.append({**identity, **_finding(task, one, result, target, knows), "files": files})
            replace_whole(home / "findings.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in findings))
        progress.finished(name, [{"status": "done"} for _ in observations])
    keys = {digest([setting, attack]) for _, attack in methods}
    return [row for row in findings if row["run"] in keys]


def unmasked(task: Task) -> tuple[Task, list[str]]:
    """The task whose model is called without masks of padding, and their names; the task itself if it needs them.

    Then nothing counts as padded. For a causal model whose texts are padded behind, that changes no update: no place
    looks at later ones, and padding has no loss.
    """
    names = [name for name, each in task.fields.items() if each.public and isinstance(each.kind, Mask)]
    if not names or not isinstance(task.objective, ModelLoss):
        return task, []
    objective = replace(task.objective, inputs=tuple(each for each in task.objective.inputs if each.field not in names))
    fields = {name: each for name, each in task.fields.items() if name not in names}
    without = Task(task.model, cast(Objective, objective), fields)
    try:
        with torch.no_grad():
            without.loss(without.weights(), without.blank(2))
    except TypeError:  # the mask is an argument without a default
        return task, []
    return without, names


def _findings(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as problem:
        raise AuditError(f"{path} cannot be read ({problem}): choose another folder.") from None


def _finding(task: Task, one: Recorded, result: Reconstruction, target: int, knows: Knowledge) -> dict[str, Any]:
    """What an attack found out about one observation."""
    from gradleak.audit.output import counted_texts, inferred

    restart = int(result.chosen[target])
    certificate = None if result.certificates is None else result.certificates[target].record()
    checks = [*observation_checks(one.seen, task), *result.checks.of(target)]
    converged = result.checks.converged[target] and not any(check.severity == "error" for check in checks)
    certified = certificate is not None and certificate["verdict"] == "determined"
    replay: dict[str, float] | None = None
    whole = _whole(task, result.target(target))
    if knows.training is not None and not task.drawn and whole is not None:
        error = replay_error(task, one.seen, whole, knows.training, defence=knows.defence)
        replay = {"error": error.relative, "cosine": error.cosine}
    curve = result.trace["match"][:, target, restart]
    start = float(curve[0]) if len(curve) else 0.0
    small = float(result.match[target, restart]) <= LEFT * start if replay is None else replay["error"] <= NEARLY
    fit = INCOMPLETE if whole is None else EXPLAINED if small else PARTLY
    return finite(
        {
            "observation": one.name,
            "round": one.seen.round,
            "clients": one.seen.clients,
            "num_examples": one.seen.num_examples,
            "kind": task.fields["x"].kind.name,
            "word": DETERMINED if certified else fit if converged else INCONCLUSIVE,
            "objective": float(result.objective[target, restart]),
            "match": float(result.match[target, restart]),
            "labels": inferred(result, target),
            **({"texts": texts} if (texts := counted_texts(result, target)) else {}),
            "certificate": certificate,
            "checks": [{key: value for key, value in asdict(check).items() if key != "target"} for check in checks],
            "replay": replay,
        }
    )


def _whole(task: Task, batch: Batch) -> Batch | None:
    """A reconstruction that can be replayed; None if tokens or inputs are missing.

    Places without a token (-1) count as padding where the task has one, and its mask leaves the padding out.
    """
    whole, field = dict(batch), task.fields["x"]
    if isinstance(field.kind, Tokens) and field.kind.padding is not None:
        whole["x"] = batch["x"].masked_fill(batch["x"] < 0, field.kind.padding)
        masks = [
            name for name, each in task.fields.items() if isinstance(each.kind, Mask) and each.shape == field.shape
        ]
        whole |= {name: (whole["x"] != field.kind.padding).long() for name in masks if name not in batch}
    if task.fields.keys() - whole.keys():
        return None
    indices = {name: value for name, value in whole.items() if not value.is_floating_point()}
    return (
        None
        if any(task.fields[name].kind.allowed(value, task.fields[name]) for name, value in indices.items())
        else whole
    )


def summary(findings: Sequence[Mapping[str, Any]]) -> str:
    """The findings as a table, and what their words mean."""
    wide = max([len(row["observation"]) for row in findings] + [11])
    method = max([len(row["attack"]) for row in findings] + [6])
    lines = [f"{'observation':{wide}}  {'attack':{method}}  {'finding':12}  {'match':>9}  {'replay':>9}  labels"]
    for row in findings:
        labels = " ".join(f"{name}={','.join(map(str, values))}" for name, values in row["labels"].items())
        labels += "".join(f" {text} ({name})" for name, text in row.get("texts", {}).items())
        match, replay = (_short(value) for value in (row["match"], (row["replay"] or {}).get("error")))
        who = f"{row['observation']:{wide}}  {row['attack']:{method}}"
        lines.append(f"{who}  {row['word']:12}  {match:>9}  {replay:>9}  {labels}")
    words = [word for word in MEANING if any(row["word"] == word for row in findings)]
    drawn = all(KINDS[row.get("kind", "image")].pictures for row in findings)  # older findings are of images
    unknown = UNKNOWN.format(shown="pictures" if drawn else "reconstructions")
    lines += ["", *(f"{word}: {MEANING[word]}" for word in words), unknown]
    return "\n".join(lines)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
