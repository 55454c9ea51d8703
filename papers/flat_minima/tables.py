"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from papers.readme import Results, Tables

METHODS = ("FedAvg", "FedSAM", "FedASAM", "FedGF", "FedSAI")
FLAT = METHODS[1:]
SCORES = "{psnr:.1f} / {ssim:s3} / {lpips:s3}"
PSNR = "{psnr:.1f}"
ROUNDS = ("0", "100", "200")
EXCESS = "{curvature excess:,.0f} +- {curvature log_determinant error:.0f}"


def tables(at: Results) -> Tables:
    printed = at.reference["table"]

    def paper(attack: str, number: str, methods: Sequence[str] = METHODS[:3]) -> str:
        return " / ".join(f"{printed[method][number][attack]['psnr']:.2f}" for method in methods)

    def modes(form: str, run: str, row: str, method: str, attack: str, letters: str = "abc", **more: str) -> str:
        cells = (at(form, run, row, a=attack, d=method, f=letter, **more) for letter in letters)
        return " / ".join(cell for cell in cells if cell)

    def first_round() -> Iterator[Sequence[str]]:
        head = ["init", "attack", "targets", "(a), all but FedSAI", "FedSAM (b)", "(c)", "FedASAM (b)", "(c)"]
        yield [*head, "paper: FedAvg / FedSAM / FedASAM"]
        for init, name, run, row, attack in (
            ("`torch`", "iDLG", "h200-init-torch", "init torch", "idlg"),
            ("`torch`", "IG", "h200-init-torch", "init torch", "ig"),
            ("`uniform05`", "IG", "h200-round-0-ig", "table, round 0", "ig"),
            ("`uniform05`", "iDLG", "cpu-round-0-idlg", "init uniform05", "idlg"),
            ("`uniform05`, eta 0.9", "iDLG", "h200-eta", "eta 0.9", "idlg"),
            ("`uniform05`, eta 0.9", "IG", "h200-eta", "eta 0.9", "ig"),
            ("`uniform05`", "GI", "h200-round-0-gi", "table, round 0", "gi"),
            ("`uniform05`", "second order", "h200-exact-0", "exact, round 0", "second-order"),
        ):
            form = PSNR if attack == "second-order" else SCORES
            places = (("FedAvg", "a"), ("FedSAM", "b"), ("FedSAM", "c"), ("FedASAM", "b"), ("FedASAM", "c"))
            cells = [at(form, run, row, a=attack, d=method, f=mode) for method, mode in places]
            targets = at("{psnr:n}", run, row, a=attack, d="FedAvg", f="a")
            yield [init, name, targets, *cells, "" if attack == "second-order" else paper(attack, "0")]

    def pretrained() -> Iterator[Sequence[str]]:
        yield ["FedSAI, `uniform05`", "(a)", "(b)", "(c)"]
        for name, run, row, attack in (
            ("IG", "h200-round-0-ig", "table, round 0", "ig"),
            ("GI", "h200-round-0-gi", "table, round 0", "gi"),
            ("second order", "h200-exact-0", "exact, round 0", "second-order"),
        ):
            yield [name, *(at(PSNR, run, row, a=attack, d="FedSAI", f=mode) for mode in "abc")]

    def later(number: str) -> Iterator[Sequence[str]]:
        runs = {
            "100": {"ig": "h200-round-100", "idlg": "h200-round-100", "second-order": "h200-exact-100"},
            "200": {"ig": "h200-round-200-ig", "idlg": "h200-round-200-idlg", "second-order": "h200-exact-200"},
        }[number]
        names = {"ig": "IG", "idlg": "iDLG", "second-order": "second order"}
        head = [word for name in names.values() for word in (f"{name} (a)", "(b)", "(c)")]
        yield ["", *head, "paper: IG", "iDLG"]
        for method in METHODS:
            line = [method]
            for attack, run in runs.items():
                row = f"{'exact' if attack == 'second-order' else 'table'}, round {number}"
                line += [at(PSNR, run, row, a=attack, d=method, f=mode) for mode in "abc"]
            yield [*line, *(paper(attack, number, (method,)) for attack in ("ig", "idlg"))]

    def gi_later() -> Iterator[Sequence[str]]:
        yield ["round", *METHODS, "paper: FedAvg / FedSAM / FedASAM"]
        for number in ("100", "200"):
            cells = [modes(PSNR, "h200-gi-later", f"table, round {number}", method, "gi") for method in METHODS]
            yield [number, *cells, paper("gi", number)]

    def flatness() -> Iterator[Sequence[str]]:
        yield ["", *FLAT]
        for number, name, attack, run in (
            ("100", "IG", "ig", "h200-round-100"),
            ("100", "iDLG", "idlg", "h200-round-100"),
            ("200", "IG", "ig", "h200-round-200-ig"),
            ("200", "iDLG", "idlg", "h200-round-200-idlg"),
            ("100", "GI (ten)", "gi", "h200-gi-later"),
            ("200", "GI (ten)", "gi", "h200-gi-later"),
        ):
            row = f"table, round {number}"
            yield [
                f"round {number}, {name}",
                *(at("{flatness psnr:to.1}", run, row, a=attack, d=method) for method in FLAT),
            ]

    def adaptive() -> Iterator[Sequence[str]]:
        yield ["best first-order attack", *(f"{method}: A0, A2, A2 of (a)" for method in FLAT)]
        form = "{adaptive naive_share:%}, {adaptive share_of_undefended:%}, {adaptive share_of_plain:%} %"
        for name, run, row in (
            ("round 0, `torch`, iDLG", "h200-init-torch", "init torch"),
            ("round 0, `uniform05`, iDLG, on a CPU", "cpu-round-0-idlg", "init uniform05"),
            ("round 100, iDLG", "h200-round-100", "table, round 100"),
            ("round 200, iDLG", "h200-round-200-idlg", "table, round 200"),
        ):
            yield [name, *(at(form, run, row, a="best", d=method) for method in FLAT)]

    def orders() -> Iterator[Sequence[str]]:
        yield ["under A0, dB", "FedAvg over FedSAM", "FedSAM over FedASAM"]
        for name, run, row, attack in (
            ("round 0, `torch`, iDLG", "h200-init-torch", "init torch", "idlg"),
            ("round 0, `torch`, IG", "h200-init-torch", "init torch", "ig"),
            ("round 0, `uniform05`, iDLG, on a CPU", "cpu-round-0-idlg", "init uniform05", "idlg"),
            ("round 0, `uniform05`, IG", "h200-round-0-ig", "table, round 0", "ig"),
            ("round 0, `uniform05`, second order", "h200-exact-0", "exact, round 0", "second-order"),
            ("round 0, `uniform05`, eta 0.9, iDLG", "h200-eta", "eta 0.9", "idlg"),
            ("round 0, `uniform05`, eta 0.9, IG", "h200-eta", "eta 0.9", "ig"),
            ("round 100, iDLG", "h200-round-100", "table, round 100", "idlg"),
            ("round 100, IG", "h200-round-100", "table, round 100", "ig"),
            ("round 100, GI", "h200-gi-later", "table, round 100", "gi"),
            ("round 200, iDLG", "h200-round-200-idlg", "table, round 200", "idlg"),
            ("round 200, IG", "h200-round-200-ig", "table, round 200", "ig"),
            ("round 200, GI", "h200-gi-later", "table, round 200", "gi"),
        ):
            form = "{order FedAvg over FedSAM:+.1f}", "{order FedSAM over FedASAM:+.1f}"
            yield [name, *(at(each, run, row, a=attack) for each in form)]

    def curve() -> Iterator[Sequence[str]]:
        yield ["round", "PSNR, dB", "excess", "largest eigenvalue", "trace", "gradient norm", "accuracy"]
        for number in range(0, 201, 10):
            place = {"run": "h200-curve-FedAvg", "row": "curve FedAvg", "s": f"round {number}"}
            trace = "{curvature trace:.0f} +- {curvature trace standard_error:.0f}"
            forms = (EXCESS, "{curvature extremes highest:.1f}", trace, "{gradient_norm:.1f}", "{test_accuracy:.3f}")
            yield [str(number), at("{psnr:.2f}", a="ig", f="a", **place), *(at(form, **place) for form in forms)]

    def correlations() -> Iterator[Sequence[str]]:
        yield ["", "plain", "partial"]
        for name, curve in (
            ("excess of the log-determinant", "excess"),
            ("largest eigenvalue", "lambda_max"),
            ("trace", "trace"),
            ("gradient norm", "gradient_norm"),
            ("test accuracy", "test_accuracy"),
            ("round", "round"),
        ):
            forms = [f"{{associations {curve} {kind}:to.2}}" for kind in ("plain", "partial")]
            yield [name, *(at(form, "h200-curve-FedAvg", "curve FedAvg", a="ig", f="a") for form in forms)]

    def long() -> Iterator[Sequence[str]]:
        numbers = range(0, 1001, 100)
        yield ["round", *(f"{number:,}" for number in numbers)]
        place = {"run": "h200-long", "row": "long FedAvg"}
        yield ["PSNR, dB", *(at(PSNR, a="idlg", f="a", s=f"round {number}", **place) for number in numbers)]
        for name, form in (
            ("excess of the log-determinant", "{curvature excess:,.0f}"),
            ("gradient norm of the targets", "{gradient_norm:.1f}"),
            ("test accuracy", "{test_accuracy:.3f}"),
        ):
            yield [name, *(at(form, s=f"round {number}", **place) for number in numbers)]

    def sam_curve() -> Iterator[Sequence[str]]:
        yield ["round", "(a) / (b) / (c)", "excess", "largest eigenvalue", "gradient norm", "accuracy"]
        for number in (0, 10, 20, 40, 60, 80, 100, 150, 200):
            place = {"run": "h200-curve-FedSAM", "row": "curve FedSAM", "s": f"round {number}"}
            cells = " / ".join(at(PSNR, a="idlg", f=mode, **place) for mode in "abc")
            top = "{curvature extremes highest:.0f}" if number == 0 else "{curvature extremes highest:.1f}"
            forms = ("{curvature excess:,.0f}", top, "{gradient_norm:.1f}", "{test_accuracy:.3f}")
            yield [str(number), cells, *(at(form, **place) for form in forms)]

    def other_curves() -> Iterator[Sequence[str]]:
        methods = ("FedASAM", "FedGF", "FedSAI")
        yield ["round", *(word for method in methods for word in (method, "excess"))]
        for number in (0, 10, 20, 40, 80, 100, 150, 200):
            line = [str(number)]
            for method in methods:
                place = {"run": f"h200-curve-{method}", "row": f"curve {method}", "s": f"round {number}"}
                line += [" / ".join(at(PSNR, a="idlg", f=mode, **place) for mode in "ac")]
                line += [at("{curvature excess:,.0f}", **place)]
            yield line

    def with_excess() -> Iterator[Sequence[str]]:
        yield ["", "plain", "partial"]
        lines = {"FedAvg, 1,000 rounds": ("h200-long", "long FedAvg", "a")}
        lines |= {method: (f"h200-curve-{method}", f"curve {method}", "a") for method in FLAT}
        lines |= {"FedSAM, (c)": ("h200-curve-FedSAM", "curve FedSAM", "c")}
        for name, (run, row, mode) in lines.items():
            forms = [f"{{associations excess {kind}:to.2}}" for kind in ("plain", "partial")]
            cells = [at(form, run, row, a="idlg", f=mode) for form in forms[: 1 if "1,000" in name else 2]]
            yield [name, *cells, *[""] * (2 - len(cells))]

    def batch() -> Iterator[Sequence[str]]:
        head = [f"{name}: iDLG, IG" for name in ("FedAvg", "FedSAM (b)", "FedSAM (c)")]
        yield ["images in the client's step", *head, "another image's update"]
        for size, run in (("1", "h200-batch"), ("2", "h200-batch"), ("4", "h200-batch-4")):
            line = [size]
            for method, mode in (("FedAvg", "a"), ("FedSAM", "b"), ("FedSAM", "c")):
                cells = (at(PSNR, run, f"batch {size}", a=attack, d=method, f=mode) for attack in ("idlg", "ig"))
                line += [", ".join(cells)]
            other = (
                at("{psnr_of_another_image:.1f}", run, f"batch {size}", a=attack, d="FedAvg", f="a")
                for attack in ("idlg", "ig")
            )
            yield [*line, ", ".join(other)]

    def seed_run(seed: str, number: str) -> tuple[str, str]:
        runs = {"0": "h200-seed-2", "100": "h200-seed-2-more", "200": "h200-seed-2-round-200"}
        return "h200-seed-1" if seed == "1" else runs[number], f"table, round {number}"

    def seeds() -> Iterator[Sequence[str]]:
        yield ["seed, round", *METHODS]
        for seed in ("1", "2"):
            for number in ROUNDS:
                cells = [modes(PSNR, *seed_run(seed, number), method, "idlg") for method in METHODS]
                if number == "0":
                    cells[1:4] = [f"(a) / {cell.split(' / ', 1)[1]}" for cell in cells[1:4]]
                yield [f"{seed}, {number}", *cells]

    def seed_gaps() -> Iterator[Sequence[str]]:
        yield ["seed, round", *FLAT]
        for seed in ("1", "2"):
            for number in ("100", "200"):
                run, row = seed_run(seed, number)
                yield [
                    f"{seed}, {number}",
                    *(at("{flatness psnr:to.1}", run, row, a="idlg", d=method) for method in FLAT),
                ]

    def rate() -> Iterator[Sequence[str]]:
        yield ["round", "", *METHODS]
        for number, name, attack in (
            ("0", "iDLG", "idlg"),
            ("100", "iDLG", "idlg"),
            ("100", "IG", "ig"),
            ("200", "iDLG", "idlg"),
            ("200", "IG", "ig"),
        ):
            run = "h200-rate-round-200" if number == "200" else "h200-rate"
            cells = [modes(PSNR, run, f"rate 0.9, round {number}", method, attack) for method in METHODS]
            if number == "0":
                cells[1:4] = [f"(a) / {cell.split(' / ', 1)[1]}" for cell in cells[1:4]]
            yield [number, name, *cells]

    def with_generators(run: str, attack: str, lines: dict[str, str]) -> Iterator[Sequence[str]]:
        places = [("FedAvg", "a"), ("FedSAM", "b"), ("FedSAM", "c"), ("FedASAM", "b"), ("FedASAM", "c")]
        head = ["(a)", "FedSAM (b)", "(c)", "FedASAM (b)", "(c)"]
        if attack == "gifd":
            places += [("FedSAI", mode) for mode in "abc"]
            head += ["FedSAI (a)", "(b)", "(c)"]
        yield ["", *head, "paper: FedAvg / FedSAM / FedASAM"]
        for name, each in lines.items():
            cells = [at(SCORES, run, "table, round 0", a=each, d=method, f=mode) for method, mode in places]
            yield [name, *cells, "" if each == "prior-only" else paper(each, "0")]

    def rho() -> Iterator[Sequence[str]]:
        head = ["rho", "round 0", "round 100", "excess", "round 200", "excess", "largest eigenvalue"]
        yield [*head, "accuracy at 200"]
        for name, run, row in (
            ("FedAvg", "h200-curve-FedAvg", "curve FedAvg"),
            ("0", "h200-rho-more", "rho 0"),
            ("0.05", "h200-rho", "rho 0.05"),
            ("0.1", "h200-rho", "rho 0.1"),
            ("0.15", "h200-rho-more", "rho 0.15"),
            ("0.2", "h200-rho", "rho 0.2"),
        ):
            line = [name]
            for number in ROUNDS:
                line += [modes(PSNR, run, row, "", "ig", s=f"round {number}")]
                line += [at(EXCESS, run, row, s=f"round {number}")] if number != "0" else []
            last = [
                at(form, run, row, s="round 200")
                for form in ("{curvature extremes highest:.1f}", "{test_accuracy:.3f}")
            ]
            yield [*line, *last]

    def information() -> Iterator[Sequence[str]]:
        yield ["round", "", "excess", "3.1", "3.2", "Sigma_G / H", "channel", "pixels (a)", "pixels (c)"]
        for number in ROUNDS:
            for method in METHODS if number != "0" else ("FedAvg", "FedSAI"):
                place = {"run": "h200-information", "row": f"information, round {number}", "d": method}
                ratio = (
                    "({covariance trace_ratio:.2f})"
                    if (number, method) == ("0", "FedAvg")
                    else "{covariance trace_ratio:.2f}"
                )
                sent = "plain" if method == "FedAvg" else "sent"
                forms = [
                    EXCESS,
                    "{index 1 determinant:,.0f}",
                    "{index 1 ball:,.0f}",
                    f"{ratio}, {{covariance top_ratios 1:.2f}}",
                ]
                forms += [f"{{channel {sent} nats, 512 releases, noise 1%:,.0f}}"]
                pixels = "{input floor psnr 1:.1f}, {input floor psnr 2:.1f}"
                yield [
                    number,
                    method,
                    *(at(form, **place) for form in forms),
                    *(at(pixels, f=mode, **place) for mode in "ac"),
                ]

    def beside_the_paper() -> Iterator[Sequence[str]]:
        names = {"idlg": "iDLG", "ig": "IG", "gias": "GIAS", "gifd": "GIFD"}
        yield [
            "PSNR, paper, rounds 0 / 100 / 200",
            *names.values(),
            "ours, iDLG, adaptive (c), rounds 0 (`torch`) / 100 / 200",
            "second order, 0 / 100 / 200",
        ]
        for method in METHODS:
            mode = "a" if method == "FedAvg" else "c"
            theirs = [" / ".join(paper(attack, number, (method,)) for number in ROUNDS) for attack in names]
            runs = (("h200-init-torch", "init torch"), ("h200-round-100", "table, round 100"))
            runs += (("h200-round-200-idlg", "table, round 200"),)
            ours = " / ".join(at(PSNR, run, row, a="idlg", d=method, f=mode) or "-" for run, row in runs)
            exact = (
                at(PSNR, f"h200-exact-{n}", f"exact, round {n}", a="second-order", d=method, f=mode) for n in ROUNDS
            )
            yield [method, *theirs, ours, " / ".join(exact)]

    def small() -> Iterator[Sequence[str]]:
        yield ["round 0", "attack", "(a), all methods", "FedSAM (b)", "FedSAM (c)", "FedASAM (b)", "FedASAM (c)"]
        for init, name, run, row, attack in (
            ("`torch`", "iDLG", "cpu-small", "init torch", "idlg"),
            ("`torch`", "IG", "cpu-small", "init torch", "ig"),
            ("`uniform05`, eta 0.9", "iDLG (not converged)", "cpu-small-uniform05", "init uniform05", "idlg"),
            ("`uniform05`, eta 0.2", "iDLG (not converged)", "cpu-small-uniform05", "eta 0.2", "idlg"),
        ):
            places = (("FedAvg", "a"), ("FedSAM", "b"), ("FedSAM", "c"), ("FedASAM", "b"), ("FedASAM", "c"))
            yield [init, name, *(at(SCORES, run, row, a=attack, d=method, f=mode) for method, mode in places)]

    def accuracy() -> Iterator[Sequence[str]]:
        yield ["test accuracy", *METHODS]
        for number in ("100", "200"):
            run = {"100": "h200-round-100", "200": "h200-round-200-ig"}[number]
            cells = (at("{test_accuracy:.3f}", run, f"table, round {number}", d=method) for method in METHODS)
            yield [f"round {number}", *cells]

    gifd = {"GIFD": "gifd", "IG, the same targets, 900 steps": "ig", "the prior alone": "prior-only"}
    gias = {"GIAS": "gias", "IG, the same targets, 720 steps": "ig"}
    return {
        "accuracy": accuracy,
        "round 0": first_round,
        "FedSAI": pretrained,
        "round 100": lambda: later("100"),
        "round 200": lambda: later("200"),
        "GI later": gi_later,
        "flatness": flatness,
        "adaptive": adaptive,
        "order": orders,
        "curve of FedAvg": curve,
        "correlations of FedAvg": correlations,
        "long": long,
        "curve of FedSAM": sam_curve,
        "other curves": other_curves,
        "correlations with the excess": with_excess,
        "batch": batch,
        "seeds": seeds,
        "seeds, flatness": seed_gaps,
        "rate 0.9": rate,
        "GIFD": lambda: with_generators("h200-gifd", "gifd", gifd),
        "GIAS": lambda: with_generators("h200-gias", "gias", gias),
        "rho": rho,
        "information": information,
        "beside the paper": beside_the_paper,
        "small": small,
    }
