"""An audit of what was recorded: observations of a real training (`flower.Tap`, `Observation.save`, adapters).

With the examples that some clients trained on, because those are the auditor's own (canaries), the same rows, table,
verdict and report as any audit: `RecordedAudit`. Without, `blind`: objective, certificate, checks, inferred labels and
pictures. Nobody can tell then how close a reconstruction is, so nothing there says that a client is safe.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradleak.adapters import fitted, read_npz
from gradleak.attack import require
from gradleak.attack.checks import observation_checks
from gradleak.audit import Audit
from gradleak.audit.cells import Cell, forms_of, named_attacks, named_defences
from gradleak.audit.private import AuditError, PrivateSide, Victims, examples_of
from gradleak.core.configuration import digest
from gradleak.core.files import replace_whole
from gradleak.core.listeners import Silent
from gradleak.engine import Engine
from gradleak.federation import Federation, Snapshot, with_buffers
from gradleak.identify import ReplayError, replay_error, rounding_of
from gradleak.scenario.defence import Defence
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.observation import BadObservation, Knowledge, Observation, stack
from gradleak.scenario.task import Batch, Task

if TYPE_CHECKING:
    from gradleak.attack import Attack, Reconstruction
    from gradleak.core.listeners import Progress
    from gradleak.scenario.client import LocalTraining

SAME = 1e-4  # relative error of a replay that is rounding: of a client that computes in float32
NEARLY = 0.1  # up to here noise or augmentation may be all that is not known
SHUFFLED = 0.5  # the same where a client shuffles its examples into batches: another order is another update
SUFFIXES = (".safetensors", ".npz")


# --- what is in the folders -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recorded:
    """One observation, under the name of its file, and what the client trained on, where that is known."""

    name: str
    seen: Observation
    truth: Batch | None = None


def read(
    folder: str | os.PathLike[str], task: Task, truth: str | os.PathLike[str] | None = None, rounds: Iterable[int] = ()
) -> list[Recorded]:
    """All observations of a folder (or one file), sorted as the task has its tensors; of these rounds, or of all.

    `truth`: a folder with files of the same names (.safetensors or .npz) that hold the fields of the task, in
    model-input space. An observation without such a file has no truth.
    """
    home, wanted = Path(folder), set(rounds)
    paths = [home] if home.is_file() else sorted(home.glob("*.safetensors"))
    if not paths:
        raise AuditError(f"{home} holds no observations: there is no *.safetensors in it.")
    if truth is not None and not Path(truth).is_dir():
        raise AuditError(f"There is no folder {truth} with the examples of the clients.")
    found: list[Recorded] = []
    for path in paths:
        seen = fitted(Observation.load(path), task)
        if wanted and seen.round not in wanted:
            continue
        seen = replace(seen, key=path.stem)  # of a file system that holds one of each: keys name one target
        batch = None if truth is None else _truth(Path(truth), path.stem, seen, task)
        found.append(Recorded(path.stem, seen, batch))
    if not found:
        raise AuditError(f"{home} holds {len(paths)} observations, none of them of round {sorted(wanted)}.")
    return found


def _truth(folder: Path, stem: str, seen: Observation, task: Task) -> Batch | None:
    path = next((folder / (stem + suffix) for suffix in SUFFIXES if (folder / (stem + suffix)).exists()), None)
    if path is None:
        return None
    batch = _tensors(path)
    needed = set(task.fields) - task.drawn
    if missing := sorted(needed - batch.keys()):
        raise AuditError(f"{path} lacks {', '.join(missing)}: it should hold {', '.join(sorted(needed))}.")
    batch = {name: value for name, value in batch.items() if name in task.fields}
    if any(len(value) != seen.num_examples for value in batch.values()):
        counts = {name: len(value) for name, value in batch.items()}
        raise AuditError(f"{path} holds {counts} examples; the client said it trained on {seen.num_examples}.")
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
    """What the recording says of the privacy wrappers of its strategy, in words; nothing: there were none."""
    path = Path(folder) / "recording.json"
    if not path.is_file():
        return []
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return [f"{one['wrapper']}: {one['says']}. {one['guarantee']['text']}" for one in held["privacy"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise AuditError(f"{path} is not a recording's description: {problem}.") from None


# --- does the stated recipe reproduce the update? ---------------------------------------------------------------------


def replays(
    task: Task, recorded: Sequence[Recorded], training: LocalTraining, defence: Defence | None = None
) -> dict[str, ReplayError]:
    """Of every observation whose examples are known: what a replay of the recipe leaves unexplained."""
    return {
        one.name: replay_error(task, one.seen, one.truth, training, defence=defence)
        for one in recorded
        if one.truth is not None
    }


def reproduced(error: ReplayError, seen: Observation, training: LocalTraining) -> str:
    """ "yes" to rounding; "nearly" where the order of batches, noise or augmentation may be all that is not known."""
    if error.relative <= max(SAME, 10 * rounding_of(seen).residual):
        return "yes"
    shuffled = any(rows is not None for rows in training.order(seen.num_examples))
    return "nearly" if error.relative <= (SHUFFLED if shuffled else NEARLY) else "no"


def told(errors: Mapping[str, ReplayError], recorded: Sequence[Recorded], training: LocalTraining) -> str:
    """The replay check in a few words, with what to do where it fails."""
    if not errors:
        return "Replay check: no examples are known, so the recipe was not replayed."
    seen = {one.name: one.seen for one in recorded}
    words = {name: reproduced(error, seen[name], training) for name, error in errors.items()}
    yes, no = (sum(word == wanted for word in words.values()) for wanted in ("yes", "no"))
    worst = max(errors, key=lambda name: errors[name].relative)
    lines = [f"Replay check: the stated recipe reproduces {yes} of {len(words)} updates; worst: {errors[worst]}."]
    if no:
        scale = errors[worst].total.scale
        hint = f" An update {1 / scale:.2g} times as long as the replay's hints at another learning rate." * (
            abs(errors[worst].cosine) > 0.99 and not 0.9 < scale < 1.1
        )
        lines.append(
            f"{no} are not reproduced ({worst} worst): recipe, defence or examples are not what was stated, and "
            f"attacks that rely on them will fall short.{hint}"
        )
    elif yes < len(words):
        lines.append("The rest nearly: the order of batches, noise, dropout or augmentation is the client's own.")
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
    """The clients of one group: recorded in one round, with equally many examples. `group` names it."""

    group: str = ""


@dataclass(frozen=True, eq=False)
class RecordedSide(PrivateSide):
    """The private side where clients have uploaded already: what is simulated here is the control and the baseline."""

    groups: Mapping[str, Sequence[Recorded]] = field(default_factory=dict)

    def count(self, federation: Federation) -> int:
        return len(self.groups[federation.group]) if isinstance(federation, RecordedClients) else self.targets

    def truth(self, federation: Federation) -> Batch:
        if not isinstance(federation, RecordedClients):
            return super().truth(federation)
        like = next(iter(self.task.weights().values()))
        held = [examples_of(one.truth, self.task, one.name) for one in self.groups[federation.group]]
        batches = [each.batch(torch.arange(len(each))) for each in held]
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
        """Of one client in as many rounds as Flower counts up to the recorded one; how it was sampled is not known."""
        proved = defence.guarantee(
            Exposure(rounds=max(1, round), examples=federation.examples or 1, training=federation.training)
        )
        said = "stated by the auditor: whether the clients used it cannot be seen in a recording"
        return proved if proved.epsilon is None else replace(proved, caveats=(*proved.caveats, said))

    def _snapshots(
        self, federation: Federation, defence: Defence | None, rounds: tuple[int, ...]
    ) -> dict[int, Snapshot]:
        if not isinstance(federation, RecordedClients):
            return super()._snapshots(federation, defence, rounds)
        seen = [one.seen for one in self.groups[federation.group]]
        return {one.round: Snapshot(one.weights, one.buffers or {}) for one in seen}


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
        seeds: Sequence[int] = (0,),
        engine: Engine | None = None,
        given: Sequence[str] = (),
        unrelated: int = 2,
        origin: Mapping[str, str] | None = None,
    ) -> RecordedAudit:
        """training   the recipe that the clients followed, as far as is known
        gallery    real images that are no client's: reconstructions are looked up among them, the baseline uses them
        defence    that the clients used
        """
        known = [one for one in recorded if one.truth is not None]
        if not known:
            raise AuditError("None of the observations has its examples beside it: name files as the observations are.")
        names = [name for name in task.fields if name not in task.drawn]
        data = {name: torch.cat([one.truth[name] for one in known if one.truth is not None]) for name in names}
        [(_, made)] = named_defences([defence])
        groups = _grouped(known)
        return RecordedAudit(
            task,
            data,
            attacks,
            (defence,),
            federation=Federation(training=training, examples=1),
            rounds=tuple(sorted({one.seen.round for one in known})),
            targets=max(map(len, groups.values())),
            seeds=tuple(seeds),
            knowledge=("naive", "masked", "adaptive"),
            repeats=1,
            engine=engine or Engine(),
            gallery=gallery,
            analyses=(Replay(training, made),),
            unrelated=unrelated,
            given=tuple(given),
            origin={"observations": "given in Python", **(origin or {})},
            recorded=tuple(known),
        )

    def cells(self) -> list[Cell]:
        [(against, defence)] = named_defences(self.defences)
        control = self._control()
        grid = [
            self._keyed(
                Cell(
                    *(attack, defence, form, held[0].seen.round, seed, self._clients(name, held), called, against),
                    given=tuple(self.given),
                    generator=self.generator,
                )
            )
            for form in forms_of(defence, self.knowledge)
            for called, attack in named_attacks(self.attacks)
            for name, held in _grouped(self.recorded).items()
            for seed in dict.fromkeys(self.seeds)
        ]
        return list({cell.key: cell for cell in (replace(control, control=True), *grid)}.values())

    def _clients(self, name: str, held: Sequence[Recorded]) -> RecordedClients:
        return RecordedClients(
            training=self.federation.training, examples=held[0].seen.num_examples, wire="weights", group=name
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


def _content(seen: Observation) -> list[Any]:
    return [seen.key, seen.num_examples, seen.round, seen.weights, seen.update, seen.buffers or {}]


# --- without the truth ------------------------------------------------------------------------------------------------

DETERMINED, EXPLAINED, PARTLY, INCONCLUSIVE = "determined", "explained", "in part", "inconclusive"
LEFT = 1e-2  # of the match at the start: where no recipe can be replayed, an update of which less is left is explained
MEANING = {
    DETERMINED: "no other examples near those that were found explain the update",
    EXPLAINED: "the examples that were found explain the update; others may do so too",
    PARTLY: "the examples that were found explain some of the update; more steps or another attack may do better",
    INCONCLUSIVE: "the attack did not get there, which says nothing about the client's safety",
}

UNKNOWN = "How close the pictures are cannot be told without the examples; nothing here says that a client is safe."


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
    """Attack all observations with all attacks, without any truth; what was found goes into `out`, and is returned.

    findings.jsonl has one line per attack and observation: `word` (determined, explained, in part or inconclusive),
    objective, match, labels, checks, certificate and, where the recipe is known, how well it reproduces the update on
    what was found. ATTACK/reconstruction.png shows it. Attacks that the folder holds already are not run again.
    """
    from gradleak.attack import output as reconstruction

    home, shown = Path(out), progress or Silent()
    home.mkdir(parents=True, exist_ok=True)
    seen, methods = [one.seen for one in recorded], named_attacks(attacks)
    for _, attack in methods:
        require(attack, knows)
    setting = digest([[_content(one) for one in seen], digest(task), knows.training, knows.defence, seed])
    kept = _findings(home / "findings.jsonl")
    shown.start(len(methods))
    for index, (name, attack) in enumerate(methods):
        key = digest([setting, attack])
        if not any(row["run"] == key for row in kept):
            shown.cell(name, index)
            found = attack.run(task, seen, knows, seed=seed, engine=engine, progress=shown.share)
            written = reconstruction.write(found, home / name.replace(":", "-").replace(",", "-").replace("/", "-"))
            rows = [_finding(task, name, key, recorded[i], found, i, knows) for i in range(len(recorded))]
            kept += [{**row, "files": [str(path.relative_to(home)) for path in written]} for row in rows]
            replace_whole(home / "findings.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in kept))
        shown.finished(name, [{"status": "done"} for _ in seen])
    wanted = {digest([setting, attack]) for _, attack in methods}
    return [row for row in kept if row["run"] in wanted]


def _findings(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as problem:
        raise AuditError(f"{path} cannot be read ({problem}): choose another folder.") from None


def _finding(
    task: Task, attack: str, key: str, one: Recorded, found: Reconstruction, target: int, knows: Knowledge
) -> dict[str, Any]:
    from gradleak.attack.output import inferred
    from gradleak.core.files import finite

    restart = int(found.chosen[target])
    certificate = None if found.certificates is None else found.certificates[target].record()
    checks = [*observation_checks(one.seen, task), *found.checks.of(target)]
    converged = found.checks.converged[target] and not any(check.severity == "error" for check in checks)
    certified = certificate is not None and certificate["verdict"] == "determined"
    replay: dict[str, float] | None = None
    if knows.training is not None and not task.drawn:
        error = replay_error(task, one.seen, found.target(target), knows.training, defence=knows.defence)
        replay = {"error": error.relative, "cosine": error.cosine}
    curve = found.trace["match"][:, target, restart]
    start = float(curve[0]) if len(curve) else 0.0
    small = float(found.match[target, restart]) <= LEFT * start if replay is None else replay["error"] <= NEARLY
    fit = EXPLAINED if small else PARTLY
    return finite(
        {
            "run": key,
            "attack": attack,
            "observation": one.name,
            "round": one.seen.round,
            "clients": one.seen.clients,
            "num_examples": one.seen.num_examples,
            "word": DETERMINED if certified else fit if converged else INCONCLUSIVE,
            "objective": float(found.objective[target, restart]),
            "match": float(found.match[target, restart]),
            "labels": inferred(found, target),
            "certificate": certificate,
            "checks": [{key: value for key, value in asdict(check).items() if key != "target"} for check in checks],
            "replay": replay,
        }
    )


def summary(findings: Sequence[Mapping[str, Any]]) -> str:
    """The findings as a table for people, and what their words mean."""
    wide = max([len(row["observation"]) for row in findings] + [11])
    method = max([len(row["attack"]) for row in findings] + [6])
    lines = [f"{'observation':{wide}}  {'attack':{method}}  {'finding':12}  {'match':>9}  {'replay':>9}  labels"]
    for row in findings:
        labels = " ".join(f"{name}={','.join(map(str, held))}" for name, held in row["labels"].items())
        match, replay = (_short(value) for value in (row["match"], (row["replay"] or {}).get("error")))
        who = f"{row['observation']:{wide}}  {row['attack']:{method}}"
        lines.append(f"{who}  {row['word']:12}  {match:>9}  {replay:>9}  {labels}")
    words = [word for word in MEANING if any(row["word"] == word for row in findings)]
    lines += ["", *(f"{word}: {MEANING[word]}" for word in words), UNKNOWN]
    return "\n".join(lines)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
