"""`gradleak prior`: generators for attacks with a generative prior: train one on public images, show one, check one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.options import Device, Output, Size
from gradleak.cli.root import CROSSED, log, on_interrupt, spare_a_core
from gradleak.core.settings import Group, takes

if TYPE_CHECKING:
    from gradleak.core.listeners import Progress
    from gradleak.generators import Card
    from gradleak.priors.splits import Split
    from gradleak.priors.training import PriorTraining, TrainedPrior

SAMPLES, ROW = 96, 12  # images on a sheet, and in one of its rows
MOST_SOURCE = 400  # characters of the data's description that are printed

app = typer.Typer(no_args_is_help=True, help="Generators as priors of attacks: train one on public images, check one.")

Part = Annotated[str, typer.Option(help="Part of the data: train or test.")]
Rows = Annotated[str, typer.Option(help="Only these rows of that part: 0-6999.")]
File = Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="A generator.")]


@dataclass(frozen=True)
class PublicImages(Group):
    """Which images of the data a generator is trained on."""

    part: Part = "train"
    rows: Rows = ""
    hold_out: Annotated[
        float, typer.Option(min=0.0, max=0.99, metavar="SHARE", help="Keep this share back, for images to attack.")
    ] = 0.0
    hold_out_seed: Annotated[int, typer.Option(help="Seed of which images are kept back.")] = 0
    exclude: Annotated[
        list[str] | None, typer.Option(help="Data that must stay unseen: images with the same pixels are left out.")
    ] = None
    size: Size = None

    def split(self, data: str) -> Split:
        from gradleak.cli.loading import numbers
        from gradleak.priors.splits import Split

        return Split(
            data,
            self.part,
            numbers(self.rows, "--rows") if self.rows else None,
            self.hold_out,
            self.hold_out_seed,
            tuple(self.exclude or ()),
            self.size,
        )


@dataclass(frozen=True)
class PriorTrainOptions:
    """The options of `gradleak prior train`."""

    data: Annotated[str, typer.Option("--data", help="Images by name (gradleak data list), an .npz or a folder.")]
    generator: Annotated[
        str,
        typer.Option("--generator", "-g", help="Architecture: stylegan2:width=256,base=4096; dcgan:width=64; wgan."),
    ] = "stylegan2"
    steps: Annotated[int, typer.Option(min=1, help="Steps in all; more than before resumes.")] = 5000
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many minutes of this call, even before --steps.")
    ] = None
    images: PublicImages = PublicImages()
    conditional: Annotated[bool, typer.Option("--conditional", help="Condition on the classes of the images.")] = False
    batch_size: Annotated[int, typer.Option(min=2, help="Real images in a step, and as many generated ones.")] = 64
    lr: Annotated[
        float | None,
        typer.Option("--lr", help="Learning rate of Adam; default 0.0025 for stylegan2, 0.0002 for the others."),
    ] = None
    r1: Annotated[float, typer.Option(help="Weight of the discriminator's gradient penalty; 0: none.")] = 0.1
    augment: Annotated[
        str, typer.Option(help="Augmentations before the discriminator: colour,translation,cutout; none.")
    ] = "colour,translation,cutout"
    mirror: Annotated[bool, typer.Option("--mirror", help="Flip half of the images left to right.")] = False
    average: Annotated[
        int, typer.Option(min=1, help="Half-life, in images, of the average of weights that is stored.")
    ] = 50_000
    seed: Annotated[int, typer.Option(help="Seed of the weights and of every draw.")] = 0
    every: Annotated[int, typer.Option(min=1, help="Steps between two sample sheets and scores.")] = 1000
    score_images: Annotated[int, typer.Option(min=0, help="Images generated for a score; 0: no score.")] = 2048
    precision: Annotated[
        str, typer.Option(help="strict (float32), fast (TF32 allowed) or half (bfloat16 products, CUDA only).")
    ] = "strict"
    full: Annotated[bool, typer.Option("--full", help="Store the generator in float32, not in half precision.")] = False
    device: Device = "auto"
    output: Output = Output()

    @property
    def architecture(self) -> str:
        return self.generator.partition(":")[0]

    @property
    def folder(self) -> Path:
        """Folder of the training without --out: the same options find, and resume, the same one."""
        return Path("runs") / f"prior-{self.architecture}-{Path(self.data).stem}"

    def training(self) -> PriorTraining:
        from gradleak.core import registry
        from gradleak.priors import recipes  # noqa: F401 (registers generators)
        from gradleak.priors.training import PriorTraining

        return PriorTraining(
            registry.parse("generator", self.generator),
            conditional=self.conditional,
            batch=self.batch_size,
            lr=self.lr,
            r1=self.r1,
            augment=() if self.augment in ("", "none") else tuple(registry.pieces(self.augment)),
            mirror=self.mirror,
            average=self.average,
            seed=self.seed,
            precision=self.precision,
        )


@app.command("train")
@takes(PriorTrainOptions)
def train(options: PriorTrainOptions) -> None:
    """Train a generator on public images, for attacks that search among its images.

    Keep the images that you attack apart: --rows, --hold-out and --exclude say what it must not see, and the file
    remembers every image that it saw (gradleak prior check).
    """
    from gradleak.cli import loading
    from gradleak.cli.progress import single_job
    from gradleak.generators import Card
    from gradleak.priors.training import train as train_prior

    device = loading.engine(options.device, "strict").where
    training = options.training()
    on_interrupt("Interrupted before the first step; nothing was written.")
    spare_a_core()
    images, split = options.images.split(options.data).taken()
    shape = "x".join(map(str, images.x.shape[1:]))
    log(f"{len(images):,} images of {shape} from {options.data} ({options.images.part} part), on {device}.")
    options.output.announce(options.folder)
    with single_job(f"training {options.architecture}, {options.steps:,} steps", options.output.plain) as progress:

        def run(folder: Path) -> TrainedPrior:
            return train_prior(
                training,
                images.x,
                images.y,
                classes=images.classes,
                steps=options.steps,
                most_seconds=None if options.minutes is None else 60 * options.minutes,
                out=folder,
                every=options.every,
                score_images=options.score_images,
                device=device,
                half=not options.full,
                card=Card(images.source, split),
                origin={"data": options.data},
                progress=_show_steps(options, progress),
            )

        trained = options.output.run(options.folder, run, "training", progress)
    _print_training(trained)


def _show_steps(options: PriorTrainOptions, progress: Progress) -> Callable[[dict[str, Any]], None]:
    """Shows the progress in steps or minutes, whichever is further, and every score."""
    began = time.monotonic()

    def show(row: dict[str, Any]) -> None:
        spent = (time.monotonic() - began) / (60 * options.minutes) if options.minutes else 0.0
        progress.share(min(1.0, max(row["step"] / options.steps, spent)))
        if row.get("score") is not None:
            progress.note(f"step {row['step']:,}: score {row['score']:.2f}, {row['seconds']:.0f} s")

    return show


def _print_training(trained: TrainedPrior) -> None:
    typer.echo(trained.table())
    if floor := trained.card.score.get("between_halves_of_real"):
        typer.echo(f"Between two halves of the real images: {floor:.2f}")
    size = f"{trained.path.stat().st_size / 1e6:.1f} MB"
    typer.echo(f"\nGenerator: {trained.path} ({size})   Samples: {trained.folder}/samples.png")


@app.command()
def show(
    file: File,
    samples: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a sheet of samples too.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of their latents.")] = 0,
) -> None:
    """What a generator is, what it was trained on and how good it is."""
    from gradleak.generators import read

    network, card = read(file)
    typer.echo(_describe(file, network, card))
    if samples is not None:
        import torch

        from gradleak.core.pictures import png, sheet

        z = torch.randn(SAMPLES, network.latent, generator=torch.Generator().manual_seed(seed))
        y = None if network.classes is None else torch.arange(SAMPLES) % network.classes
        with torch.no_grad():
            images = network(z, y).clamp(0, 1)
        scale = max(1, 64 // max(network.shape[1:]))
        samples.write_bytes(png(sheet([("", list(row)) for row in images.split(ROW)], scale)))
        typer.echo(f"wrote {samples}")


@app.command()
def check(
    file: File,
    data: Annotated[str, typer.Option("--data", help="Images that are to be attacked: was it trained on any?")] = "",
    part: Part = "train",
    rows: Rows = "",
    size: Size = None,
) -> None:
    """Can this file be used, and was it trained on none of the images to be attacked? Exit code 1 if it was."""
    import torch

    from gradleak.generators import read

    network, card = read(file)
    z = torch.randn(2, network.latent, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        samples = network(z, None if network.classes is None else torch.zeros(2, dtype=torch.int64))
    if not bool(torch.isfinite(samples).all()):
        raise ValueError(f"{file}: its images are not finite.")
    typer.echo(f"{file}: {network.architecture}, images of {'x'.join(map(str, network.shape))}, fits.")
    if not data:
        return
    images, _ = PublicImages(part, rows, size=size).split(data).taken()
    trained_on = card.seen(images.x)
    typer.echo(f"Of {len(images):,} images of {data} ({part} part) it was trained on {len(trained_on):,}.")
    if len(trained_on):
        typer.echo(f"The first is row {int(trained_on[0])} of them. Attack others, or train without them (--exclude).")
        raise typer.Exit(CROSSED)


def _describe(file: Path, network: Any, card: Card) -> str:
    """A generator and its card as lines for people."""
    from gradleak.generators.files import parameters

    shape = "x".join(map(str, network.shape))
    classes = "" if network.classes is None else f", {network.classes} classes"
    source = "".join(each if each.isprintable() else "?" for each in card.data[:MOST_SOURCE])  # a file may say anything
    lines = [
        f"{file}: {network.architecture}, {parameters(network):,} weights, images of {shape}{classes}, "
        f"{network.blocks} blocks, latent of {network.latent}",
        "settings   " + ", ".join(f"{name}={value}" for name, value in network.settings.items()),
        f"data       {source or 'not stated'}",
    ]
    if card.images is not None:
        lines.append(f"           {len(card.images):,} images, each known by its fingerprint")
    for name in ("split", "training", "score"):
        entries = getattr(card, name)
        if entries:
            lines.append(f"{name:<11}" + ", ".join(f"{key!r:.40}: {value!r:.120}" for key, value in entries.items()))
    return "\n".join(lines)
