"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from papers.readme import Results, Tables, number

SETS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Tiny-ImageNet (untrained)": "tiny-imagenet"}
SCORES = "{psnr:.2f} / {ssim:s3}"
OVERLAY = "{overlay_mse:.0f} / {overlay_psnr:.1f} / {overlay_ssim:s2}"


def tables(at: Results) -> Tables:
    printed, overlays = at.reference["attacks"], at.reference["heat maps"]["cifar10"]

    def theirs(data: str, attack: str, defence: str) -> str:
        scores = printed[data][attack][defence]
        return f"{scores['psnr']:.2f} / {number(scores['ssim'], 's3')}"

    def overlay(defence: str) -> str:
        scores = overlays.get(defence)
        if scores is None:
            return ""
        return f"{scores['mse']:.0f} / {scores['psnr']:.2f} / {number(scores['ssim'], 's2')}"

    def attacks() -> Iterator[Sequence[str]]:
        yield ["", *(word for name in SETS for word in (f"{name}, ours", "paper"))]
        for defence, form in (
            ("No DP", "A0"),
            ("DP", "A0"),
            ("AGP", "A0"),
            ("TIP", "A0"),
            ("TIP", "A0'"),
            ("AGP", "A1"),
            ("TIP", "A1"),
            ("TIP", "A2"),
        ):
            line = [f"{defence}, {form}"]
            for data in SETS.values():
                line += [at(SCORES, f"h200-table-{data}", f"table {data}", d=defence, f=form)]
                line += [theirs(data, "IG", defence) if form in ("A0", "A0'") else ""]
            yield line
        for name, form, places in (
            ("an update of another image", "{psnr_of_another_image:.2f}", ("No DP",)),
            ("labels right: No DP, DP, AGP, TIP", "{label_accuracy:%}", ("No DP", "DP", "AGP", "TIP")),
        ):
            line = [name]
            for data in SETS.values():
                cells = [at(form, f"h200-table-{data}", f"table {data}", d=d, f="A0") for d in places]
                line += [", ".join(cells) + (" %" if len(cells) > 1 else ""), ""]
            yield line

    def gifd() -> Iterator[Sequence[str]]:
        yield ["CIFAR-10, GIFD", "ours, A0", "A1", "A2", "paper, A0"]
        for defence in ("No DP", "DP", "AGP", "TIP"):
            cells = [at(SCORES, "h200-gifd", "table cifar10, gifd", d=defence, f=form) for form in ("A0", "A1", "A2")]
            yield [defence, *cells, theirs("cifar10", "GIFD", defence)]
        alone = at(SCORES, "h200-gifd", "table cifar10, prior only", d="No DP", f="A0")
        yield ["the generator alone, no update", alone, "", "", ""]

    def strength() -> Iterator[Sequence[str]]:
        betas = ("0.00114", "0.0057", "0.02", "0.1")
        yield ["beta", "none", *betas]
        for form in ("A0", "A1", "A2"):
            names = ("No DP", *(f"beta {beta}" for beta in betas))
            yield [form, *(at("{psnr:.2f}", "h200-sweep-beta", "sweep beta", d=name, f=form) for name in names)]

    def sweep(kind: str, names: Sequence[str]) -> Iterator[Sequence[str]]:
        yield ["", "none", *names]
        for form in ("A0", "A1"):
            yield [form, *(at(SCORES, "h200-sweeps", f"sweep {kind}", d=d, f=form) for d in ("No DP", *names))]

    def ablation() -> Iterator[Sequence[str]]:
        yield ["A0 / A1", "high frequencies (TIP)", "low", "all"]
        place = ("h200-ablation", "sweep ablation")
        for channels in ("top", "bottom", "random"):
            cells = [
                " / ".join(at("{psnr:.2f}", *place, d=f"{channels}, {band}", f=form) for form in ("A0", "A1"))
                for band in ("high", "low", "all")
            ]
            yield [f"{channels} channels{' (TIP)' if channels == 'top' else ''}", *cells]
        yield ["No DP", at("{psnr:.2f}", *place, d="No DP", f="A0"), "", ""]
        yield ["an update of another image", at("{psnr_of_another_image:.1f}", *place, d="No DP", f="A0"), "", ""]

    def lenet(run: str, form: str) -> Iterator[Sequence[str]]:
        forms = ("A0", "A1", "A2", "A0'")
        yield ["LeNet", *forms]
        for defence in ("No DP", "beta 0.0057", "beta 0.1"):
            yield [defence, *(at(form, run, "table lenet", d=defence, f=each) for each in forms)]

    def maps(run: str, lines: Sequence[tuple[str, str, str]], mse: str) -> Iterator[Sequence[str]]:
        head = ["", "raw map: MSE", "PSNR", "SSIM", "rank correlation", "IoU", "overlay: MSE / PSNR / SSIM"]
        yield [*head, "paper's overlay", "that client's own model: accuracy"]
        forms = (f"{{mse:{mse}}}", "{psnr:.1f}", "{ssim:s3}", "{rank_correlation:s3}", "{top_overlap:s2}", OVERLAY)
        for name, row, defence in lines:
            cells = [at(form, run, f"maps cifar10, {row}", d=defence) for form in forms]
            right = at("{test_accuracy:.3f}", run, f"maps cifar10, {row}", d=defence)
            yield [name, *cells, overlay(defence) if row == "local" else "", right]

    def accuracy() -> Iterator[Sequence[str]]:
        names = ("No DP", "DP", "AGP", "TIP")
        yield ["the federation after ten rounds: accuracy", *names]
        for name, run in (("ResNet-18", "h200-maps"), ("small, on a CPU", "cpu-small-maps")):
            yield [name, *(at("{final_accuracy:.3f}", run, "accuracy cifar10, pretrained", d=d) for d in names)]

    def small() -> Iterator[Sequence[str]]:
        yield ["CIFAR-10, IG", "A0", "A1", "A2", "A0'"]
        betas = ("0.02", "0.0057", "0.00114")
        lines = [(name, "table cifar10", name) for name in ("No DP", "DP", "AGP")]
        lines += [
            ("AGP, labels given", "table cifar10, labels given", "AGP"),
            ("TIP, beta 0.0969", "table cifar10", "TIP"),
        ]
        lines += [(f"TIP, beta {beta}", "sweep beta", f"beta {beta}") for beta in betas]
        for name, row, defence in lines:
            yield [
                name,
                *(
                    at("{psnr:.2f} / {ssim:.3f}", "cpu-small-attacks", row, d=defence, f=form)
                    for form in ("A0", "A1", "A2", "A0'")
                ),
            ]

    full = [("No DP (twice, in TF32)", "local", "No DP"), *((name, "local", name) for name in ("DP", "AGP", "TIP"))]
    full += [
        ("top channels, low frequencies", "ablation", "top, low"),
        ("top, all", "ablation", "top, all"),
        ("bottom, high", "ablation", "bottom, high"),
        ("random, high", "ablation", "random, high"),
    ]
    thin = [(name, "local", name) for name in ("DP", "AGP", "TIP")]
    thin += [("TIP, beta 0.02", "beta", "beta 0.02"), ("TIP, beta 0.0057", "beta", "beta 0.0057")]
    thin += [(f"TIP, beta 0.1: {name}", "ablation", name) for name in ("top, low", "bottom, high", "random, high")]
    return {
        "attacks": attacks,
        "GIFD": gifd,
        "strength": strength,
        "share of channels": lambda: sweep("r", ("r 0.02", "r 0.1", "r 0.3", "r 1")),
        "radius": lambda: sweep("R", ("R 0.5", "R 1.2", "R 1.5", "R 0.5, centre as printed")),
        "ablation": ablation,
        "LeNet": lambda: lenet("h200-table-lenet", "{psnr:.2f}"),
        "maps": lambda: maps("h200-maps", full, ".4f"),
        "accuracy": accuracy,
        "small": small,
        "small LeNet": lambda: lenet("cpu-lenet", "{psnr:.1f} / {ssim:.2f}"),
        "small maps": lambda: maps("cpu-small-maps", thin, ".5f"),
    }
