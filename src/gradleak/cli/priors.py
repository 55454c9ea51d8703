"""`gradleak prior`: generators for attacks with a generative prior: train one on public images, look at one, check one.

Everything that needs torch is imported inside the commands.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.options import Plain

if TYPE_CHECKING:
    from gradleak.generators import Card

app = typer.Typer(no_args_is_help=True, help="Generators as priors of attacks: train one on public images, check one.")

Data = Annotated[str, typer.Option("--data", help="Images by name (gradleak data list), an .npz or a folder.")]
Part = Annotated[str, typer.Option(help="Of the data: train or test.")]
Rows = Annotated[str, typer.Option(help="Only these rows of that part: 0-6999.")]
Size = Annotated[int | None, typer.Option(min=1, help="Crop images centrally to a square, and resize to this side.")]
File = Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="A generator.")]


@app.command()
def train(
    context: typer.Context,
    data: Data,
    generator: Annotated[
        str, typer.Option("--generator", "-g", help="stylegan2:width=256,base=4096; dcgan:width=64; wgan.")
    ] = "stylegan2",
    steps: Annotated[int, typer.Option(min=1, help="Steps in all; more than before goes on.")] = 5000,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="End after so many minutes of this call, before --steps if need be.")
    ] = None,
    part: Part = "train",
    rows: Rows = "",
    hold_out: Annotated[
        float, typer.Option(min=0.0, max=0.99, metavar="SHARE", help="Keep this share back, for images to attack.")
    ] = 0.0,
    hold_out_seed: Annotated[int, typer.Option(help="Of which images are kept back.")] = 0,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Data that must stay unseen: images with the same pixels are left out.")
    ] = None,
    size: Size = None,
    conditional: Annotated[bool, typer.Option("--conditional", help="On the classes of the images.")] = False,
    batch_size: Annotated[int, typer.Option(min=2, help="Images in a step, real and made each.")] = 64,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Of Adam; default 0.0025 for stylegan2, 0.0002 for the others.")
    ] = None,
    r1: Annotated[float, typer.Option(help="Weight of the discriminator's gradient penalty; 0: none.")] = 0.1,
    augment: Annotated[
        str, typer.Option(help="What the discriminator sees is changed by: colour,translation,cutout; none.")
    ] = "colour,translation,cutout",
    mirror: Annotated[bool, typer.Option("--mirror", help="Flip half of the images left to right.")] = False,
    average: Annotated[
        int, typer.Option(min=1, help="Images after which a weight counts half in the average that is kept.")
    ] = 50_000,
    seed: Annotated[int, typer.Option(help="Of the weights and of every draw.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Steps between two sample sheets and scores.")] = 1000,
    score_images: Annotated[int, typer.Option(min=0, help="Images made for a score; 0: no score.")] = 2048,
    precision: Annotated[
        str, typer.Option(help="strict (float32), fast (TF32 allowed) or half (bfloat16 products, CUDA only).")
    ] = "strict",
    full: Annotated[bool, typer.Option("--full", help="Keep the generator in float32, not in half precision.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... ; auto takes CUDA where there is one.")] = "auto",
    plain: Plain = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; the same one goes on.")] = None,
) -> None:
    """Train a generator on public images, for attacks that search among what it can make.

    Keep apart what you attack: --rows, --hold-out and --exclude say what it must not see, and the file remembers every
    image that it saw (gradleak prior check).
    """
    from gradleak.cli import loading
    from gradleak.cli.progress import shown
    from gradleak.core import registry
    from gradleak.generators import Card
    from gradleak.priors import recipes  # noqa: F401 (registers them)
    from gradleak.priors.splits import Split
    from gradleak.priors.training import PriorTraining, TrainedPrior
    from gradleak.priors.training import train as trained

    where = loading.engine(device, "strict").where
    training = PriorTraining(
        registry.parse("generator", generator),
        conditional=conditional,
        batch=batch_size,
        lr=lr,
        r1=r1,
        augment=() if augment in ("", "none") else tuple(registry.pieces(augment)),
        mirror=mirror,
        average=average,
        seed=seed,
        precision=precision,
    )
    context.find_root().obj = "Interrupted before the first step; nothing was written."
    loading.leave_room()
    only = loading.numbers(rows, "--rows") if rows else None
    held, told = Split(data, part, only, hold_out, hold_out_seed, tuple(exclude or ()), size).taken()
    folder = Path("runs") / f"prior-{generator.partition(':')[0]}-{Path(data).stem}"
    sizes = "x".join(map(str, held.x.shape[1:]))
    typer.echo(f"{len(held):,} images of {sizes} from {data} ({part} part), on {where}.", err=True)
    typer.echo(f"Into {out or folder}. Ctrl-C is safe: the same command goes on.", err=True)
    with shown(plain) as progress:
        progress.start(1)
        progress.cell(f"training {generator.partition(':')[0]}, {steps:,} steps", 0)

        began = time.monotonic()

        def noted(row: dict[str, Any]) -> None:
            spent = 0.0 if not minutes else (time.monotonic() - began) / (60 * minutes)
            progress.share(min(1.0, max(row["step"] / steps, spent)))
            if row.get("score") is not None:
                progress.note(f"step {row['step']:,}: score {row['score']:.2f}, {row['seconds']:.0f} s")

        def run(place: Path) -> TrainedPrior:
            return trained(
                training,
                held.x,
                held.y,
                classes=held.classes,
                steps=steps,
                most_seconds=None if minutes is None else 60 * minutes,
                out=place,
                every=every,
                score_images=score_images,
                device=where,
                half=not full,
                card=Card(held.source, told),
                origin={"data": data},
                progress=noted,
            )

        done = loading.kept_in(out, folder, run, "training", progress)
    typer.echo(done.table())
    if floor := done.card.score.get("between_halves_of_real"):
        typer.echo(f"Between two halves of the real images: {floor:.2f}")
    typer.echo(
        f"\nGenerator: {done.path} ({done.path.stat().st_size / 1e6:.1f} MB)   Samples: {done.folder}/samples.png"
    )


@app.command()
def show(
    file: File,
    samples: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a sheet of samples too.")] = None,
    seed: Annotated[int, typer.Option(help="Of their latents.")] = 0,
) -> None:
    """What a generator is, what it was trained on and how good it is."""
    from gradleak.generators import read

    network, card = read(file)
    typer.echo(described(file, network, card))
    if samples is not None:
        import torch

        from gradleak.core.pictures import png, sheet

        z = torch.randn(96, network.latent, generator=torch.Generator().manual_seed(seed))
        y = None if network.classes is None else torch.arange(96) % network.classes
        with torch.no_grad():
            made = network(z, y).clamp(0, 1)
        scale = max(1, 64 // max(network.shape[1:]))
        samples.write_bytes(png(sheet([("", list(row)) for row in made.split(12)], scale)))
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

    from gradleak.cli.loading import numbers
    from gradleak.generators import read
    from gradleak.priors.splits import Split

    network, card = read(file)
    z = torch.randn(2, network.latent, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made = network(z, None if network.classes is None else torch.zeros(2, dtype=torch.int64))
    if not bool(torch.isfinite(made).all()):
        raise ValueError(f"{file}: its images are not finite.")
    typer.echo(f"{file}: {network.architecture}, images of {'x'.join(map(str, network.shape))}, fits.")
    if not data:
        return
    held, _ = Split(data, part, numbers(rows, "--rows") if rows else None, size=size).taken()
    seen = card.seen(held.x)
    typer.echo(f"Of {len(held):,} images of {data} ({part} part) it was trained on {len(seen):,}.")
    if len(seen):
        typer.echo(f"The first is row {int(seen[0])} of them. Attack others, or train without them (--exclude).")
        raise typer.Exit(1)


def described(file: Path, network: Any, card: Card) -> str:
    """A card as lines for people."""
    from gradleak.generators.files import parameters

    made = f"{network.architecture}, {parameters(network):,} weights, images of {'x'.join(map(str, network.shape))}"
    kind = "" if network.classes is None else f", {network.classes} classes"
    lines = [f"{file}: {made}{kind}, {network.blocks} blocks, latent of {network.latent}"]
    settings = network.settings
    lines.append("settings   " + ", ".join(f"{name}={value}" for name, value in settings.items()))
    source = "".join(each if each.isprintable() else "?" for each in card.data[:400])  # a file may say anything
    lines.append(f"data       {source or 'not said'}")
    if card.images is not None:
        lines.append(f"           {len(card.images):,} images, each known by its fingerprint")
    for name in ("split", "training", "score"):
        held = getattr(card, name)
        if held:
            lines.append(f"{name:<11}" + ", ".join(f"{key!r:.40}: {value!r:.120}" for key, value in held.items()))
    return "\n".join(lines)
