"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from papers.readme import Results, Tables, number

NAMES = {"fedleak": "FEDLEAK", "ig-ms": "IG-ms", "sme": "SME", "nl-sme": "NL-SME", "coarse-replay": "coarse replay"}
PSNR, PAIR = "{psnr:.2f}", "{psnr:.2f} / {ssim:s3}"
OURS = {
    "fedleak": f"{PAIR} / {{l_sim_raw:s4}} raw",
    "ig-ms": f"{PAIR} / {{l_sim_obj:s4}}",
    "sme": f"{PAIR} / {{l_sim_obj:s4}}",
    "nl-sme": f"{PAIR} / {{l_sim_obj:s4}} / {{l_sim_raw:s4}}",
    "coarse-replay": f"{PAIR} / {{l_sim_obj:s4}}",
}
GAP = "{paired psnr:in.2}"
GRID = {
    "CIFAR-100, E 50, B 10": ("h200-grid", "cifar100, E 50, B 10"),
    "CIFAR-100, E 20, B 20": ("h200-grid", "cifar100, E 20, B 20"),
    "CIFAR-100, E 50, B 20": ("h200-grid", "cifar100, E 50, B 20"),
    "characters, E 50, B 10": ("h200-grid", "letters, E 50, B 10"),
    "characters, E 20, B 20": ("h200-grid", "letters, E 20, B 20"),
    "characters, E 50, B 20 (300 steps, TF32)": ("h200-letters-more", "letters, E 50, B 20"),
}
ABLATED = {
    "SME": "sme",
    "B: straight, scaled": "nl-sme-b",
    "A: curved, not scaled": "nl-sme-a",
    "NL-SME": "nl-sme",
    "scaled entry by entry": "nl-sme, element",
    "SME, three points on its line (ours)": "sme, 3 nodes",
}
WAY = [
    "{growth line rms:s3} / {growth bezier rms:s3}",
    "{growth gain:.1f}",
    "{growth mismatch start:s3}",
    "{growth mismatch line:s3}",
    "{growth mismatch bezier:s3}",
    "{growth mismatch along_line:s3} / {growth mismatch along_bezier:s3} / {growth mismatch along_path:s3}",
    " / ".join(f"{{growth mismatch replays {steps}:s3}}" for steps in (2, 5, 10, 20)),
]
WAY_HEAD = ["line / Bezier", "gain", "at w0", "best on line", "best on Bezier", "mean along line / Bezier / path"]
WAY_HEAD += ["coarse replay, K = 2 / 5 / 10 / 20"]


def tables(at: Results) -> Tables:
    printed = at.reference["table"]

    def paper(place: str, method: str) -> str:
        scores = printed[place].get(method)
        if scores is None:
            return "-"
        return f"{scores['psnr']:.2f} / {number(scores['ssim'], 's3')} / {number(scores['l_sim'], 's4')}"

    def colour() -> Iterator[Sequence[str]]:
        yield ["CIFAR-100, B 10", "paper, E 20", "ours", "paper, E 50", "ours (**four** clients, 400 steps)"]
        for method, name in NAMES.items():
            run, kind = ("h200-coarse", "coarse") if method == "coarse-replay" else ("h200-table", "table")
            first = at(OURS[method], run, f"{kind} cifar100, E 20, B 10", a=method)
            second = at(OURS[method], "h200-coarse-50", "coarse cifar100, E 50, B 10", a=method)
            name += ", K = 20 (E 20: 600 steps)" if method == "coarse-replay" else ""
            yield [name, paper("cifar100, E 20, B 10", method), first, paper("cifar100, E 50, B 10", method), second]

    def characters() -> Iterator[Sequence[str]]:
        yield ["characters, B 10, E 20", "paper (FEMNIST)", "ours (EMNIST letters)", "600 steps"]
        for method, name in NAMES.items():
            name += ", K = 10" if method == "coarse-replay" else ""
            ours = at(OURS[method], "h200-letters", "table letters, E 20, B 10", a=method)
            shorter = at(OURS[method], "h200-coarse-letters", "coarse letters, E 20, B 10", a=method)
            yield [name, paper("letters, E 20, B 10", method), ours, shorter]

    def grid() -> Iterator[Sequence[str]]:
        methods = ("fedleak", "ig-ms", "sme", "nl-sme")
        yield ["paper's PSNR / ours", *(NAMES[method] for method in methods), "NL-SME over SME"]
        for name, (run, place) in GRID.items():
            ours = [f"{printed[place][m]['psnr']:.2f} / {at(PSNR, run, f'table {place}', a=m)}" for m in methods]
            yield [name, *ours, at(GAP, run, f"table {place}", a="nl-sme over sme")]

    def paired() -> Iterator[Sequence[str]]:
        yield ["", "clients", "NL-SME over SME", "coarse replay over NL-SME"]
        for name, first, second in (
            ("CIFAR-100, E 20, B 10", ("h200-table", "table cifar100, E 20, B 10"), None),
            ("CIFAR-100, E 50, B 10", None, ("h200-coarse-50", "coarse cifar100, E 50, B 10")),
            (
                "characters, E 20, B 10",
                ("h200-letters", "table letters, E 20, B 10"),
                ("h200-coarse-letters", "coarse letters, E 20, B 10"),
            ),
            ("characters, E 50, B 10 (K = 10, 300 steps)", None, ("h200-letters-more", "coarse letters, E 50, B 10")),
        ):
            cells = [at(GAP, *first, a="nl-sme over sme") if first else ""]
            cells += [at(GAP, *second, a="coarse-replay over nl-sme") if second else ""]
            counted = [
                at("{paired psnr:n}", *place, a=pair)
                for place, pair in ((first, "nl-sme over sme"), (second, "coarse-replay over nl-sme"))
                if place
            ]
            yield [name, " and ".join(dict.fromkeys(counted)), *cells]

    def writers() -> Iterator[Sequence[str]]:
        methods = ("ig-ms", "sme", "nl-sme")
        yield ["", *(NAMES[method] for method in methods), "coarse replay", "coarse replay over NL-SME"]
        for name, run, row in (
            ("Original, E 20, B 10", "h200-writers", "original, E 20, B 10"),
            ("Original, E 50, B 10", "h200-writers", "original, E 50, B 10"),
            ("Enhanced, E 20, B 10", "h200-writers", "enhanced, E 20, B 10"),
            ("Enhanced, E 50, B 10 (TF32)", "h200-letters-more", "enhanced, E 50, B 10"),
        ):
            cells = [f"{at(PSNR, run, row, a=m)} ({printed[row][m]['psnr']:.2f})" for m in methods]
            last = at(PSNR, run, row, a="coarse-replay"), at(GAP, run, row, a="coarse-replay over nl-sme")
            yield [name, *cells, *last]

    def ablation() -> Iterator[Sequence[str]]:
        places = (("h200-frozen", "ablation cifar100"), ("h200-letters-more", "ablation letters"))
        small = ("cpu-small", "ablation cifar100")
        theirs = at.reference["ablation"]["cifar100"]
        head = ["CIFAR-100, 500 steps", "over SME", "letters, 300 steps, TF32", "over SME"]
        yield ["PSNR", "paper, CIFAR-100", *head, "small, on a CPU: CIFAR-100"]
        for name, method in ABLATED.items():
            line = [f"{theirs[method]['psnr']:.2f}" if method in theirs else ""]
            for place in places:
                line += [at(PSNR, *place, a=method), at(GAP, *place, a=f"{method} over sme")]
            yield [name, *line, at(PSNR, *small, a=method)]

    def frozen() -> Iterator[Sequence[str]]:
        yield ["images stay noise", "L_sim obj / raw", "PSNR", "small, on a CPU: L_sim obj / raw", "PSNR"]
        form = "{l_sim_obj:s3} / {l_sim_raw:s3}"
        for name, method in (
            ("IG-ms", "ig-ms, frozen"),
            ("SME", "sme, frozen"),
            ("NL-SME", "nl-sme, frozen"),
            ("scaled entry by entry", "nl-sme, element, frozen"),
        ):
            places = (("h200-frozen", "frozen noise cifar100"), ("cpu-small-frozen", "frozen noise cifar100"))
            yield [name, *(at(each, *place, a=method) for place in places for each in (form, PSNR))]

    def lanes() -> Iterator[Sequence[str]]:
        yield ["SME, ten clients", "as lanes, s", "one by one, s", "share of the time"]
        for name, run in (("TF32, 200 steps", "h200-lanes-fast"), ("strict float32, 60 steps", "h200-lanes")):
            forms = ("{seconds_of_lanes:.2f}", "{seconds_one_by_one:.2f}", "{share:.3f}")
            yield [name, *(at(form, run, "lanes cifar100, sme") for form in forms)]

    def tuned() -> Iterator[Sequence[str]]:
        rows = ("K 10, tv 0.01", "K 10, tv 0.005", "K 10, tv 0.003", "K 20, tv 0.005")
        yield ["coarse replay on the client for tuning", *rows]
        yield ["PSNR", *(at("{psnr:.1f}", "h200-tune", row) for row in rows)]

    def scale() -> Iterator[Sequence[str]]:
        methods = ("ig-ms", "sme", "nl-sme")
        yield ["N", *(NAMES[method] for method in methods), "NL-SME over SME"]
        for count in (10, 20, 50, 100, 200):
            place = ("h200-scale", f"scale {count}")
            yield [str(count), *(at(PAIR, *place, a=m) for m in methods), at(GAP, *place, a="nl-sme over sme")]

    def architectures() -> Iterator[Sequence[str]]:
        methods = ("ig-ms", "sme", "nl-sme", "coarse-replay")
        head = ["", "clients", *(NAMES[method] for method in methods)]
        yield [*head, "NL-SME over SME", "coarse replay over NL-SME"]
        for name, model in (
            ("CNNmnist", "cnn-mnist"),
            ("MLP", "mlp-sme"),
            ("ResNet8", "resnet8"),
            ("ViT of SME", "vit-sme"),
        ):
            place = ("h200-architectures", f"architecture {model}")
            gaps = [at(GAP, *place, a=pair) for pair in ("nl-sme over sme", "coarse-replay over nl-sme")]
            weights, clients = at("{parameters:,.0f}", *place), at("{psnr:n}", *place, a="sme")
            yield [f"{name}, {weights}", clients, *(at(PAIR, *place, a=m) for m in methods), *gaps]

    def labels() -> Iterator[Sequence[str]]:
        rules = ("path-bias", "path-bias:at=average", "path-rows", "lowest-sums", "bias-corrected")
        yield ["", *rules, "SME with labels by path-bias (given)"]
        for name, run, row in (
            ("CIFAR-100, E 20 / 50", "h200-labels", "labels cifar100"),
            ("letters, E 20 / 50", "h200-labels", "labels letters"),
            ("small, of 10: CIFAR-100", "cpu-small", "labels cifar100"),
            ("small, of 10: letters", "cpu-small", "labels letters"),
        ):
            wrong = [
                " / ".join(at("{epochs_of wrong:.1f}", run, row, a=rule, s=epochs) or "-" for epochs in ("20", "50"))
                for rule in rules
            ]
            given = at(PSNR, run, row, a="sme")
            yield [name, *wrong, f"{at(PSNR, run, row, a='sme, labels by path-bias')} dB ({given})"]

    def dlfa() -> Iterator[Sequence[str]]:
        methods = ("ig-ms", "sme", "dlfa", "coarse-replay")
        yield ["", "T", *("DLFA" if m == "dlfa" else NAMES[m] for m in methods), "coarse replay over SME"]
        for data, place, steps in (
            ("letters", "E 1, B 5", "10"),
            ("letters", "E 5, B 5", "50"),
            ("letters", "E 10, B 10", "50"),
            ("letters", "E 10, B 5", "100"),
            ("cifar100", "E 1, B 5", "10"),
            ("cifar100", "E 5, B 5", "50"),
        ):
            run = "h200-dlfa" if data == "letters" else "h200-dlfa-cifar100"
            row = f"dlfa {data}, {place}"
            name = f"{data.replace('cifar100', 'CIFAR-100')}, {place}"
            gap = at(GAP, run, row, a="coarse-replay over sme")
            yield [name, steps, *(at(PAIR, run, row, a=m) for m in methods), gap]

    def real() -> Iterator[Sequence[str]]:
        methods = {"SME": "sme", "NL-SME": "nl-sme", "coarse replay: rule known": "coarse-replay"}
        methods |= {"plain SGD assumed": "coarse-replay, plain SGD assumed"}
        methods |= {"told nothing": "coarse-replay, recipe unknown"}
        yield ["the client's rule", *methods]
        for name, rule in (
            ("momentum", "momentum"),
            ("momentum and weight decay", "momentum and weight decay"),
            ("weight decay", "weight decay"),
            ("falling rate", "falling rate"),
            ("dropout (masks stay the client's)", "dropout"),
            ("mirrored images (coins stay the client's)", "mirrored images"),
            ("Adam", "adam"),
        ):
            yield [name, *(at(PSNR, "h200-real", f"real client, {rule}", a=m) for m in methods.values())]

    def ways(lines: Sequence[tuple[str, str, str, str, str]]) -> Iterator[Sequence[str]]:
        yield ["", "T", *WAY_HEAD]
        for name, run, data, epochs, steps in lines:
            place = {"run": run, "row": f"trajectory {data}, E {epochs}, B 10", "s": f"T {steps}"}
            yield [name, steps, *(at(form, **place) for form in WAY)]

    def small() -> Iterator[Sequence[str]]:
        yield ["", "CIFAR-100, E 20, B 10", "letters, E 20, B 10"]
        form = "{psnr:.2f} / {ssim:s3} / {l_sim_obj:s3} / {l_sim_raw:s3}"
        for method, name in NAMES.items():
            coarse = method == "coarse-replay"
            run, kind = ("cpu-small-coarse", "coarse") if coarse else ("cpu-small", "table")
            cells = (at(form, run, f"{kind} {data}, E 20, B 10", a=method) for data in ("cifar100", "letters"))
            yield [name + (", K = 10" if coarse else ""), *cells]
        for name, pair, run, kind in (
            ("NL-SME over SME, dB", "nl-sme over sme", "cpu-small", "table"),
            ("coarse replay over NL-SME, dB", "coarse-replay over nl-sme", "cpu-small-coarse", "coarse"),
        ):
            yield [name, *(at(GAP, run, f"{kind} {data}, E 20, B 10", a=pair) for data in ("cifar100", "letters"))]

    full = [
        ("CIFAR-100, CNNcifar", "h200-trajectory", "cifar100", "20", "100"),
        ("", "h200-trajectory", "cifar100", "50", "250"),
        ("letters, CNNmnist", "h200-trajectory", "letters", "20", "100"),
        ("", "h200-trajectory", "letters", "50", "250"),
    ]
    thin = [
        ("CIFAR-100" if steps == "10" else "", "cpu-small", "cifar100", "20", steps) for steps in ("10", "25", "50")
    ]
    thin += [("", "cpu-small", "cifar100", "50", "125"), ("letters", "cpu-small", "letters", "20", "50")]
    thin += [("", "cpu-small", "letters", "50", "125")]
    one = [("letters", "cpu-trajectory", "letters", "20", steps) for steps in ("10", "20", "50", "100")]
    return {
        "CIFAR-100": colour,
        "characters": characters,
        "grid": grid,
        "paired": paired,
        "writers": writers,
        "ablation": ablation,
        "frozen noise": frozen,
        "lanes": lanes,
        "tuning": tuned,
        "scale": scale,
        "architectures": architectures,
        "labels": labels,
        "DLFA": dlfa,
        "real clients": real,
        "trajectories": lambda: ways(full),
        "small": small,
        "small trajectories": lambda: ways(thin),
        "one trajectory": lambda: ways(one),
    }
