"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from papers.readme import Results, Tables

NAMES = {"gifd": "GIFD", "gias": "GIAS", "ggl": "GGL (CMA-ES)", "ig": "IG", "prior-only": "`prior-only`"}
BOTH = "{psnr:.1f} / {lpips:.3f}"
WORDS = {"ig": "IG", "ggl": "GGL", "gifd": "GIFD", "prior-only": "`prior-only`"}


def tables(at: Results) -> Tables:
    def compared() -> Iterator[Sequence[str]]:
        yield ["", "PSNR", "SSIM", "above `prior-only`, dB", "blobs, 1,200 evaluations: PSNR"]
        place = ("h200-in", "prior in distribution")
        for attack, name in NAMES.items():
            above = "" if attack == "prior-only" else at(f"{{above_prior {attack}:to.1}}", *place)
            blobs = at("{psnr:.1f}", "h200-in-blobs", "prior in distribution", a=attack)
            yield [name, at("{psnr:.2f}", *place, a=attack), at("{ssim:s3}", *place, a=attack), above, blobs]

    def paired() -> Iterator[Sequence[str]]:
        yield ["", "dB"]
        for name, pair in (("GIFD over GIAS", "gifd over gias"), ("GIAS over IG", "gias over ig")):
            yield [name, at(f"{{paired {pair}:to.1}}", "h200-in", "prior in distribution")]

    def defended() -> Iterator[Sequence[str]]:
        yield ["PSNR / LPIPS", "targets", *WORDS.values(), "IG - GGL", "IG - GIFD"]
        for name, run in (
            ("noise 0.01", "h200-defended"),
            ("noise 0.1", "h200-defended"),
            ("pruning 90 %", "h200-defended"),
            ("soteria 10 %", "h200-defended"),
            ("soteria 80 %", "cpu-small"),
        ):
            place = (run, f"defended {name}")
            gaps = [at(f"{{lpips_paired ig over {other}:to.3}}", *place) for other in ("ggl", "gifd")]
            line = [name + (" (small, 300 evaluations)" if run == "cpu-small" else ""), at("{psnr:n}", *place, a="ig")]
            yield [*line, *(at(BOTH, *place, a=attack) for attack in WORDS), *gaps]

    def wrong() -> Iterator[Sequence[str]]:
        yield ["PSNR / LPIPS", *WORDS.values(), "GGL above the prior, dB", "GIFD above the prior, dB"]
        for name in ("in distribution", "wrong class", "out of distribution"):
            place = ("cpu-small", f"prior {name}")
            above = [at(f"{{above_prior {attack}:to.1}}", *place) for attack in ("ggl", "gifd")]
            yield [name, *(at("{psnr:.2f} / {lpips:.3f}", *place, a=attack) for attack in WORDS), *above]

    def generator() -> Iterator[Sequence[str]]:
        yield ["generator", "Frechet distance in random features", "between two halves of the real images"]
        for name, run in (("`cifar10-stylegan2`", "h200-generator"), ("blobs", "h200-generator-blobs")):
            forms = ("{score:.3f}", "{score between_halves_of_real:.3f}")
            yield [name, *(at(form, run, "generator") for form in forms)]

    def cost() -> Iterator[Sequence[str]]:
        yield ["GIFD, five stages of 100 steps", "targets", "seconds", "GiB", "PSNR"]
        forms = ("{psnr:n}", "{seconds:.0f}", "{memory_gib:.1f}", "{psnr:.1f}")
        yield ["beside three other processes", *(at(form, "h200-cost", "cost gifd") for form in forms)]

    return {
        "in distribution": compared,
        "paired": paired,
        "defended": defended,
        "wrong priors": wrong,
        "generator": generator,
        "cost": cost,
    }
