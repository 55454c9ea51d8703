"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from papers.readme import Results, Tables

INTERVAL, MEAN = "{psnr:to.1}", "{psnr:.1f}"
RECOVERED = "{psnr:to.1}, {above_40:%} %"
CONTROLS = ("prior only", "mid-grey", "x_t itself")
SPAN = {
    "untrained": [
        ("cifar10 32, r0", "10", "cpu-span-r0"),
        ("cifar10 32, r0", "50", "cpu-span-r0-more"),
        ("cifar10 32, r0", "200", "cpu-span-r0-last"),
        ("cifar10 32, r0", "500", "cpu-span-r0-more"),
        ("cifar10 32, r0", "900", "cpu-span-r0-last"),
    ],
    "trained": [("cifar10 32, trained", t, "cpu-span-trained-rows") for t in ("10", "50", "200", "500", "900")],
    "CelebA, trained": [("celeba64 32, trained", t, "cpu-span-faces") for t in ("50", "500")],
    "bedrooms, trained": [("houses64 32, trained", t, "cpu-span-rooms") for t in ("50", "500")],
}


def each(metric: str, count: int, form: str) -> str:
    return ", ".join(f"{{{metric} {number}:{form}}}" for number in range(1, count + 1))


def tables(at: Results) -> Tables:
    def adam() -> Iterator[Sequence[str]]:
        yield ["t", "PSNR: mean, median", "lowest", "share of images at 40 dB or more"]
        for t in ("1", "10", "50", "200"):
            forms = ("{psnr:.1f}, {psnr median:.1f}", "{psnr lowest:.1f}", "{above_40:%} %")
            yield [t, *(at(form, "h200-known-r0", f"known, cifar10 32, r0, t {t}", a="invg-dm") for form in forms)]

    def spectral() -> Iterator[Sequence[str]]:
        yield ["t", "PSNR: mean (95 %), median", "lowest", "at 40 dB or more"]
        for t in ("1", "10", "50"):
            forms = ("{psnr:to.1}, {psnr median:.1f}", "{psnr lowest:.1f}", "{above_40:%} %")
            row = f"known, cifar10 32, r0, t {t}"
            yield [t, *(at(form, "h200-spectral-r0", row, a="spectral-dm") for form in forms)]

    def waves() -> Iterator[Sequence[str]]:
        head = ["victim", "t", "PSNR: mean (95 %), median", "lowest", "at 40 dB or more (90 % asked)"]
        yield [*head, "starts: median, most"]
        for name, victim, t, run, attack in (
            ("untrained", "r0", "1", "h200-waves-r0-t1", "spectral-dm"),
            ("", "r0", "10", "h200-waves-r0-t10", "spectral-dm"),
            ("", "r0", "50", "h200-spectral-r0-t50", "spectral-dm"),
            ("InvG-dm", "r0", "200", "h200-known-r0", "invg-dm"),
            ("", "r0", "500", "h200-waves-r0-t500", "spectral-dm"),
            ("", "r0", "900", "h200-waves-r0-t900", "spectral-dm"),
            ("trained", "trained", "1", "h200-trained-t1", "spectral-dm"),
            *(("", "trained", t, "h200-spectral-trained", "spectral-dm") for t in ("10", "50", "200", "500")),
        ):
            row = f"known, cifar10 32, {victim}, t {t}"
            mean = MEAN if attack == "invg-dm" else INTERVAL
            forms = [f"{mean}, {{psnr median:.1f}}", "{psnr lowest:.1f}", "{above_40:%} %"]
            forms += ["{starts median:.0f}, {starts highest:.0f}"] if "waves" in run else []
            cells = [at(form, run, row, a=attack) for form in forms]
            yield [name, t, *cells, *[""] * (4 - len(cells))]

    def others() -> Iterator[Sequence[str]]:
        steps = {"1": "", "10": "-more", "50": "", "200": "-more", "500": "-more"}
        yield ["", *(f"t {t}" for t in steps)]
        for name, data, file in (("CelebA", "celeba64", "faces"), ("bedrooms", "houses64", "rooms")):
            for attack in ("spectral-dm", "dlg-dm"):
                cells = [
                    at(RECOVERED, f"h200-{file}{more}", f"known, {data} 32, trained, t {t}", a=attack)
                    for t, more in steps.items()
                ]
                yield [f"{name}, `{attack}`{', 300 iterations' if attack == 'dlg-dm' else ''}", *cells]

    def larger() -> Iterator[Sequence[str]]:
        yield ["", "t 50", "t 200"]
        for name, data in (("CelebA", "celeba64"), ("bedrooms", "houses64")):
            rows = (f"known, {data} 64, r0, t {t}" for t in ("50", "200"))
            yield [name, *(at(RECOVERED, "h200-64", row, a="spectral-dm") for row in rows)]

    def unknown() -> Iterator[Sequence[str]]:
        attacks = ("dlg-dm", "dlg-dm, x_t and residual", "gidm")
        head = ["DLG-dm", "DLG-dm, x_t and residual", "GIDM", "the prior alone", "mid-grey", "x_t itself"]
        yield ["", *head, "best above the prior"]
        for name, data, t, run in (
            ("CIFAR-10, t 1", "cifar10", "1", "h200-unknown"),
            ("t 10", "cifar10", "10", "h200-unknown-more"),
            ("t 50", "cifar10", "50", "h200-unknown-more"),
            ("t 200", "cifar10", "200", "h200-unknown-more"),
            ("CelebA, t 1", "celeba64", "1", "h200-faces"),
            ("t 50", "celeba64", "50", "h200-faces"),
            ("bedrooms, t 1", "houses64", "1", "h200-rooms"),
            ("t 50", "houses64", "50", "h200-rooms"),
        ):
            row = f"unknown, {data} 32, trained, t {t}"
            cells = [at(INTERVAL, run, row, a=attack) for attack in attacks]
            controls = [at(MEAN, run, row, a=control) for control in CONTROLS]
            yield [name, *cells, *controls, at("{above_prior best:to.1}", run, row)]

    def small_unknown() -> Iterator[Sequence[str]]:
        head = ["victim", "t", "`spectral-dm`, x_t and q", "starts", "cosine of the noise"]
        head += ["DLG-dm, x_t and residual, 500 iterations", "mid-grey", "x_t itself"]
        yield [*head, "`spectral-dm` as it is now (turned)", "starts"]
        for victim in ("r0", "trained"):
            for t in ("10", "50", "200", "500"):
                row, old, new = f"unknown, cifar10 32, {victim}, t {t}", "cpu-unknown-small", "cpu-unknown-turned"
                psnr, starts = each("psnr_of_each", 4, ".1f"), each("starts", 4, ".0f")
                first = [at(form, old, row, a="spectral-dm") for form in (psnr, starts, "{noise_cosine:s4}")]
                plain = at(psnr, old, row, a="dlg-dm, x_t and residual")
                controls = [at(MEAN, new, row, a=control) for control in CONTROLS[1:]]
                now = [at(form, new, row, a="spectral-dm") for form in (psnr, starts)]
                yield [{"r0": "untrained"}.get(victim, "trained, 30 rounds"), t, *first, plain, *controls, *now]

    def full_size() -> Iterator[Sequence[str]]:
        yield ["victim", "t", "PSNR (95 %)", "of each image", "LPIPS", "SSIM", "mid-grey", "x_t itself: PSNR, LPIPS"]
        for name, victim, t in (
            ("untrained", "r0", "10"),
            ("", "r0", "50"),
            ("", "r0", "200"),
            ("trained", "trained", "10"),
            ("", "trained", "50"),
        ):
            run, row = f"h200-unknown-spectral-{victim}-t{t}", f"unknown, cifar10 32, {victim}, t {t}"
            forms = (INTERVAL, each("psnr_of_each", 8, ".1f"), "{lpips:s3}", "{ssim:s3}")
            cells = [at(form, run, row, a="spectral-dm") for form in forms]
            grey = at("{psnr:.1f}, {lpips:s3}, {ssim:s3}", run, row, a="mid-grey")
            yield [name, t, *cells, grey, at("{psnr:.1f}, {lpips:s3}", run, row, a="x_t itself")]

    def span() -> Iterator[Sequence[str]]:
        head = ["victim", "t", "PSNR of each image", "mean (95 %)", "starts", "cosine of the noise", "mid-grey"]
        yield [*head, "x_t itself"]
        for name, lines in SPAN.items():
            for number, (data, t, run) in enumerate(lines):
                row = f"unknown, {data}, t {t}"
                psnr, starts = each("psnr_of_each", 4, ".1f"), each("starts", 4, ".0f")
                cells = [at(form, run, row, a="span-dm") for form in (psnr, INTERVAL, starts, "{noise_cosine:.4f}")]
                cells += [at(MEAN, run, row, a=control) for control in CONTROLS[1:]]
                yield ["" if number else name, t, *cells]

    def batches() -> Iterator[Sequence[str]]:
        yield ["two images, steps 10 and 50", "batch 1", "batch 2", "cosine of the noise", "mid-grey"]
        for name, victim, run, count in (
            ("untrained, 64 channels", "r0", "cpu-span-batch-r0", 1),
            ("trained, 32 channels", "trained", "cpu-span-batch", 2),
        ):
            row = f"batch, cifar10 32, {victim}, 2 images"
            cells = [
                at(each(f"psnr_of_examples, batch {number}", 2, ".1f"), run, row, a="span-dm")
                if number <= count
                else ""
                for number in (1, 2)
            ]
            yield [name, *cells, at("{noise_cosine:s2}", run, row, a="span-dm"), at(MEAN, run, row, a="mid-grey")]

    def defended() -> Iterator[Sequence[str]]:
        yield ["", "PSNR of each", "share outside", "cosine of the noise"]
        place = ("cpu-span-defended", "defended, cifar10 32, trained, t 50")
        names = ["none", "clipping:norm=0.01", "withholding:layer=down.1.smaller"]
        names += [f"local-gaussian:clip=0.01,noise_multiplier={m}" for m in ("1e-07", "1e-06", "1e-05", "0.0001")]
        names += [f"pruning:keep={share}" for share in ("0.9", "0.5", "0.1")]
        for name in names:
            forms = (each("psnr_of_each", 2, ".1f"), each("outside", 2, ".0e"), "{noise_cosine:.3f}")
            yield [f"`{name}`" if ":" in name else name, *(at(form, *place, d=name) for form in forms)]
        yield ["mid-grey", at(each("psnr_of_each", 2, ".1f"), *place, d="mid-grey"), "", ""]

    def phases() -> Iterator[Sequence[str]]:
        attacks = {
            "GIDM, phase 1": "gidm, phase 1",
            "GIDM, both phases": "gidm",
            "DLG-dm": "dlg-dm",
            "InvG-dm": "invg-dm",
        }
        yield ["PSNR (95 %)", *attacks]
        for t, run in (("50", "h200-phases"), ("200", "h200-phases-t200")):
            row = f"known, cifar10 32, trained, t {t}"
            yield [f"t {t}", *(at(INTERVAL, run, row, a=attack) for attack in attacks.values())]

    def cost() -> Iterator[Sequence[str]]:
        yield ["", "seconds", "GiB"]
        for name, run, row in (
            ("GIDM, phase 1, 32 lanes, 32 x 32, K = 16, 500 iterations, alone", "h200-cost", "cost, gidm, 32 lanes"),
            ("DLG-dm, 4 lanes, 128 x 128, 100 iterations, beside nine processes", "h200-64", "cost, 128 x 128"),
        ):
            yield [name, *(at(form, run, row) for form in ("{seconds:.0f}", "{memory_gib:.1f}"))]

    def modes() -> Iterator[Sequence[str]]:
        yield ["", "PSNR (95 %)", "LPIPS", "steps right, %", "off by", "above the prior", "the paper"]
        place = ("h200-modes", "modes, cifar10 32, trained")
        figures = at.reference["modes"]
        for name, mode in (
            ("noise and step known", "known-both"),
            ("step unknown: searched for (soft)", "unknown-t"),
            ("step unknown: **read off**", "unknown-t, read"),
            ("noise unknown", "unknown-eps"),
            ("both unknown: step searched for", "unknown-both"),
            ("both unknown: step **read off**", "unknown-both, read"),
            ("both unknown, step drawn and kept", "no-t-opt"),
            ("both unknown, noise drawn and kept", "no-eps-opt"),
        ):
            cells = [at(form, *place, a=mode) for form in (INTERVAL, "{lpips:s3}", "{t right:%}", "{t off_by:.0f}")]
            yield [name, *cells, at(f"{{above_prior {mode}:to.1}}", *place), figures.get(mode, "")]
        for control in ("prior only", "mid-grey"):
            yield [control, *(at(form, *place, a=control) for form in (MEAN, "{lpips:s3}")), "", "", "", ""]

    def small() -> Iterator[Sequence[str]]:
        attacks = ("dlg-dm", "invg-dm", "gidm, phase 1", "gidm", "second-order")
        yield ["known, untrained victim, two images: mean PSNR, lowest", *attacks]
        for name, t in (("t 10 of 1,000 (here 1 of 100)", "10"), ("t 200 (20)", "200")):
            row = f"known, cifar10 32, r0, t {t}"
            form = "{psnr:.1f}, {psnr lowest:.1f}"
            yield [name, *(at(form, "cpu-small", row, a=attack) for attack in attacks)]

    return {
        "known, InvG-dm": adam,
        "known, spectral-dm": spectral,
        "known, waves": waves,
        "other images": others,
        "64 x 64": larger,
        "unknown": unknown,
        "unknown, spectral-dm, small": small_unknown,
        "unknown, spectral-dm": full_size,
        "span-dm": span,
        "batches": batches,
        "defended": defended,
        "phases": phases,
        "cost": cost,
        "modes": modes,
        "small": small,
    }
