"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from papers.readme import Results, Tables, number

BOTH, OTHER = "{psnr:.1f} / {ssim:s3}", "{unrelated psnr:.1f} / {unrelated ssim:s3}"
THEIRS = "{s004_compat oracle_psnr:.1f} / {s004_compat oracle_ssim:s3}"  # the paper's convention
CLASS = "an image of each class, s004_compat"
ORACLE = "{no update oracle_psnr:.1f} / {no update oracle_ssim:s3}"
UNSEEN = "{no update psnr:.1f} / {no update ssim:s3}"
ALGORITHMS = ("FedAVG", "SecAdam", "DP-FedAVG", "DP-SecAdam")
TRACKED = "tracked (v forgets by beta2)"
SUM, RATIO, MASKED = "sum (secure aggregation)", "ratio (SecAdam)", "masked sum (what SecAdam's server holds)"
TRAITOR = "one traitor (first moments of the others)"
INVERTED = {
    "Fashion-MNIST, LeNet": ("h200-inversion", "FMNIST, lenet"),
    "Fashion-MNIST, CNN": ("h200-inversion", "FMNIST, cnn"),
    "CIFAR-10, ConvNeXt": ("h200-inversion-cifar10", "CIFAR-10, convnext"),
    "CIFAR-100, ConvNeXt": ("h200-inversion-cifar100", "CIFAR-100, convnext"),
    "SVHN, ConvNeXt": ("h200-inversion-svhn", "SVHN, convnext"),
    "Tiny-ImageNet, ConvNeXt": ("h200-inversion-tiny", "Tiny-ImageNet, convnext"),
    "CIFAR-10, ResNetV2": ("h200-inversion-cifar10-resnetv2", "CIFAR-10, resnetv2"),
    "CIFAR-100, ResNetV2": ("h200-inversion-cifar100-resnetv2", "CIFAR-100, resnetv2"),
    "SVHN, ResNetV2": ("h200-inversion-svhn-resnetv2", "SVHN, resnetv2"),
    "Tiny-ImageNet, ResNetV2": ("h200-inversion-tiny-resnetv2", "Tiny-ImageNet, resnetv2"),
}
POOLS = {"no pool": "none", "max 2": "max 2", "max 3": "max 3", "avg 2": "average 2", "avg 3": "average 3"}
STARTS = {"uniform": "uniform", "mosaic-8": "repeated pattern", "red": "red"}
ACTIVATIONS = {"relu": "ReLU", "elu": "ELU", "sigmoid": "sigmoid", "leaky_relu": "leaky ReLU", "tanh": "tanh"}


def ablated(pool: str, start: str, size: int) -> str:
    """The run that has a table of the ablation."""
    first, second = {
        "no pool": ("none", "none-more"),
        "max 2": ("max-2", "max-2-single"),
        "max 3": ("max-3", "max-3"),
        "avg 2": ("avg-2", "avg-2-single"),
        "avg 3": ("avg-3", "avg-3"),
    }[pool]
    later = size == 1 or (pool == "no pool" and start != "uniform")
    return f"h200-ablation-{second if later else first}"


def tables(at: Results) -> Tables:
    reference = at.reference

    def printed(dataset: str, algorithm: str) -> str:
        name = dataset.replace("Tiny-ImageNet", "Tiny-Imagenet")
        scores = [e for e in reference["inversion"] if (e["dataset"], e["algorithm"]) == (name, algorithm)]
        return f"{scores[0]['psnr']:.1f} / {number(scores[0]['ssim'], 's3')}" if scores else ""

    def labels(run: str, rows: dict[str, str]) -> Iterator[Sequence[str]]:
        yield ["share of labels right, %", *rows]
        lines = [
            (f"one client, one image: `sign`, {rule}", f"{rule}, one client, B 1", "sign")
            for rule in ("SecAdam", "SecLion")
        ]
        lines += [
            (f"one client, eight images: `{rule}`", "SecAdam, one client, B 8", rule)
            for rule in ("sign", "row-minimum")
        ]
        lines += [
            (f"{n} clients, one image each: `ratio-counts`", f"SecAdam, {n} clients, B 1", "ratio-counts")
            for n in (2, 4, 8, 16, 50)
        ]
        for name, setting, rule in lines:
            yield [name, *(at(f"{{{rule}:%}}", run, f"labels {row}", s=setting) for row in rows.values())]
        yield ["accuracy of the network", *(at("{test_accuracy:%}", run, f"labels {row}") for row in rows.values())]

    def cosines() -> Iterator[Sequence[str]]:
        views = {"signs": "signs", "SecAdam's ratio": "ratio", "r m, which SecAdam's server holds": "masked sum"}
        views |= {"SecLion's c / e": "SecLion's ratio"}
        yield ["clients", *views]
        for size in ("1", "2", "8", "50"):
            forms = [f"{{cosine_with_the_mean_gradient {view}:s3}}" for view in views.values()]
            yield [size, *(at(form, "cpu-small-clients", "clients cifar10", s=size) for form in forms)]

    def few_clients() -> Iterator[Sequence[str]]:
        yield [
            "clients",
            "the sum: iDLG / `sign-matching`",
            "the ratio: `sign-matching` / iDLG, A0",
            "labels from the ratio",
            "mid-grey",
        ]
        place = {"run": "cpu-small-clients", "row": "clients cifar10"}
        for size in ("1", "2", "4"):
            plain = [at("{psnr:.1f}", f=SUM, a=attack, s=size, **place) for attack in ("idlg", "sign-matching")]
            ratio = [at("{psnr:.1f}", f=RATIO, a=attack, s=size, **place) for attack in ("sign-matching", "idlg, A0")]
            right = at("{labels:%} %", f=RATIO, a="sign-matching", s=size, **place)
            yield [size, " / ".join(plain), " / ".join(ratio), right, at("{psnr:.1f}", f="mid-grey", s=size, **place)]

    def one_client() -> Iterator[Sequence[str]]:
        yield ["view and attack", "its own image", "unrelated"]
        place = {"run": "cpu-small-one-client", "row": "clients cifar10", "s": "1"}
        for name, view, attack in (
            ("the sum: iDLG", SUM, "idlg"),
            ("the sum: `sign-matching`", SUM, "sign-matching"),
            ("the ratio: `sign-matching`", RATIO, "sign-matching"),
            ("the ratio: iDLG, A0", RATIO, "idlg, A0"),
            ("the ratio: iDLG, A2 (through Adam, as the paper's)", RATIO, "idlg, A2"),
            ("the ratio: smooth signs after the hinge", RATIO, "sign-matching, both"),
            ("r m: iDLG", MASKED, "idlg"),
        ):
            yield [name, *(at(form, f=view, a=attack, **place) for form in (BOTH, OTHER))]
        yield ["mid-grey", at(BOTH, f="mid-grey", **place), ""]

    def cohorts(run: str, row: str) -> Iterator[Sequence[str]]:
        head = ["clients", "the sum: iDLG", "`sign-matching`", "the ratio: `sign-matching`", "iDLG, A0", "r m: iDLG"]
        yield [*head, "one traitor: iDLG on the others", "mid-grey"]
        for size in ("1", "2", "4", "8"):
            views = ((SUM, "idlg"), (SUM, "sign-matching"), (RATIO, "sign-matching"), (RATIO, "idlg, A0"))
            views += ((MASKED, "idlg"), (TRAITOR, "idlg"), ("mid-grey", ""))
            yield [size, *(at(BOTH, run, row, f=view, a=attack, s=size) for view, attack in views)]

    def rounds() -> Iterator[Sequence[str]]:
        yield ["rounds", "moments replayed", "each taken for the first"]
        for count in ("1", "2", "4", "8"):
            names = (f"{count} rounds, tracked", f"{count} rounds, each as the first")
            yield [count, *(at("{psnr:.1f}", "cpu-small-rounds", "rounds cifar10", f=name) for name in names)]

    def tracked(run: str, size: str) -> Iterator[Sequence[str]]:
        cohorts_ = ("n 1", "n 5", "n 20")
        head = ["rounds", "median error of sizes, %, n = 1, 5, 20", "cosine with the round's mean gradient: tracked"]
        yield [*head, "r m of that round", "the ratio of that round"]
        for count in ("1", "10", "30", "100"):
            line = [count]
            for form, view in (
                ("{median_error_of_sizes:%1}", TRACKED),
                ("{cosine_with_the_gradient:s4}", TRACKED),
                ("{r m, with the gradient:s2}", "cosines of what one round shows"),
                ("{ratio, with the gradient:s2}", "cosines of what one round shows"),
            ):
                row = f"state cifar10, B {size}"
                if count == "1" and form.startswith("{cosine"):  # then it is r m itself
                    form, view = "{r m, with the gradient:s4}", "cosines of what one round shows"
                line += [", ".join(at(form, run, row, s=f"{n}; {count} rounds", f=view) for n in cohorts_)]
            yield line

    def estimates() -> Iterator[Sequence[str]]:
        yield [
            "after 100 rounds, n = 1, 5, 20",
            "median error of sizes, %",
            "cosine with the gradient",
            "eight images: error, %",
            "cosine",
        ]
        for name in ("largest of all rounds", "largest of the later half", TRACKED):
            line = [name]
            for size in ("1", "8"):
                for form in ("{median_error_of_sizes:%1}", "{cosine_with_the_gradient:s4}"):
                    cells = (
                        at(form, "cpu-small-state", f"state cifar10, B {size}", s=f"{n}; 100 rounds", f=name)
                        for n in ("n 1", "n 5", "n 20")
                    )
                    line += [", ".join(cells)]
            yield line

    def lion() -> Iterator[Sequence[str]]:
        yield ["SecLion, one round", "n = 1", "5", "20"]
        for name, form in (
            ("median error of sizes, %", "{median_error_of_sizes:%}"),
            ("cosine with c", "{cosine_with_c:s3}"),
        ):
            cells = (
                at(form, "cpu-small-state", "state cifar10, B 1", s=n, f="SecLion, one round")
                for n in ("n 1", "n 5", "n 20")
            )
            yield [name, *cells]

    def inverted() -> Iterator[Sequence[str]]:
        runs = ("cpu-small-state-inverted", "h200-state")
        yield [
            "the server's view of round 100",
            *(word for name in ("small", "H200") for word in (f"{name}: its own image", "unrelated", "label right, %")),
        ]
        for name, view in (
            ("the exact gradient, no SecAdam", "exact gradient"),
            ("tracked", "tracked"),
            ("r m of that round", "r m"),
            ("the ratio of that round", "ratio"),
        ):
            forms = (BOTH, OTHER, "{labels:%}")
            yield [name, *(at(form, run, "state cifar10, inverted", f=view) for run in runs for form in forms)]
        grey = [at(BOTH, run, "state cifar10, inverted", f="mid-grey") for run in runs]
        yield ["mid-grey", grey[0], "", "", grey[1], "", ""]

    def exact() -> Iterator[Sequence[str]]:
        yield [
            "clients",
            "the sum: mean, lowest",
            "SecAdam's ratio",
            "batches with every image exact, %: sum, ratio",
            "small: the sum",
            "the ratio",
        ]
        for count in (1, 2, 3, 4, 8):
            names = [f"{view}, n {count}" for view in ("sum", "ratio")]
            form = "{psnr:.1f}, {psnr lowest:.1f}"
            line = [at(form, "h200-exact", "exact cifar10", f=name) for name in names]
            line += [", ".join(at("{all_exact:%}", "h200-exact", "exact cifar10", f=name) for name in names)]
            yield [str(count), *line, *(at(form, "cpu-small-exact", "exact cifar10", f=name) for name in names)]

    def inversion(names: Sequence[str]) -> Iterator[Sequence[str]]:
        yield ["", *(word for name in names for word in (f"{name}: the paper's convention", "the paper", "one to one"))]
        for algorithm in ALGORITHMS:
            line = [algorithm]
            for name in names:
                run, row = INVERTED[name]
                paper = "" if row.endswith(("cnn", "resnetv2")) else printed(row.split(",")[0], algorithm)
                forms = [at(form, run, f"inversion {row}", d=algorithm) for form in (THEIRS, BOTH)]
                line += [forms[0], paper, forms[1]]
            yield line
        places = [(run, f"inversion {row}") for run, row in (INVERTED[name] for name in names)]
        for title, form, view, side in (
            ("a test image of each class, no update", ORACLE, CLASS, 0),
            ("nearest image of the class, no update", UNSEEN, "nearest of class", 2),
            ("mid-grey", UNSEEN, "mid-grey", 2),
        ):
            cells = [["", "", ""] for _ in places]
            for cell, place in zip(cells, places):
                cell[side] = at(form, *place, f=view)
            yield [title, *(word for cell in cells for word in cell)]
        right = [at("{test_accuracy:%1} %", *place) for place in places]
        yield ["accuracy of the network", *(word for each in right for word in (each, "", ""))]

    def gradients(run: str, model: str) -> Iterator[Sequence[str]]:
        yield [
            model.replace("cnn", "CNN").replace("lenet", "LeNet"),
            "uniform start",
            "from class images",
            "the paper",
            "one to one, uniform start",
        ]
        rows = [f"gradients FMNIST, {model}{start}" for start in ("", ", from class images")]
        scores = reference["gradients"][f"FMNIST {model}"]
        for attack in ("iDLG", "CPL", "sign-matching (ours)"):
            for algorithm in ALGORITHMS:
                name = f"{attack}, {algorithm}"
                theirs = scores.get(attack, {}).get(algorithm)
                paper = f"{theirs['psnr']:.1f} / {number(theirs['ssim'], 's3')}" if theirs else ""
                starts = [at(THEIRS, run, row, a=name) for row in (rows if theirs else rows[:1])]
                yield [name, *starts, *([] if theirs else [""]), paper, at(BOTH, run, rows[0], a=name)]
        yield ["a test image of each class, no update", "", at(ORACLE, run, rows[1], f=CLASS), "", ""]

    def ablation() -> Iterator[Sequence[str]]:
        yield ["pooling, start, batch", *ACTIVATIONS.values(), "SSIM-PSNR correlation (1,000 runs; the paper .747)"]
        for pool, name in POOLS.items():
            for size in (8, 1):
                for start, word in STARTS.items():
                    run, row = ablated(pool, start, size), f"ablation {pool}, {start}, B {size}"
                    yield [
                        f"{name}, {word}, B {size}",
                        *_norms(run, row, "{s004_compat oracle_ssim:s2}"),
                        at("{correlation_of_ssim_and_psnr:s2}", run, row),
                    ]
            run, row = ablated(pool, "uniform", 8), f"ablation {pool}, uniform, B 8"
            yield [f"accuracy, {name}, %", *_norms(run, row, "{test_accuracy:%}"), ""]
        run, row = "cpu-ablation-sigmoid", "ablation sigmoid, 30 epochs"
        for title, form in (
            ("sigmoid after 30 epochs, on a CPU", "{s004_compat oracle_ssim:s2}"),
            ("its accuracy, %", "{test_accuracy:%}"),
        ):
            cells = _norms(run, row, form)
            yield [
                title,
                *(cell if "/" in cell and cell != " / " else "" for cell in cells),
                at("{correlation_of_ssim_and_psnr:s2}", run, row) if "after" in title else "",
            ]

    def _norms(run: str, row: str, form: str) -> list[str]:
        return [
            " / ".join(at(form, run, row, s=f"{kind}, {norm}") for norm in ("none", "layer")) for kind in ACTIVATIONS
        ]

    def small_ablation() -> Iterator[Sequence[str]]:
        yield ["pooling, start, B", *ACTIVATIONS.values(), "SSIM-PSNR correlation (20 runs)"]
        for pool, start, size in (
            ("no pool", "uniform", 8),
            ("no pool", "mosaic-8", 8),
            ("no pool", "red", 8),
            ("max 2", "uniform", 8),
            ("avg 2", "uniform", 8),
            ("avg 2", "mosaic-8", 8),
            ("no pool", "uniform", 1),
        ):
            run, row = "cpu-small-ablation", f"ablation {pool}, {start}, B {size}"
            name = f"{POOLS[pool]}, {STARTS[start]}, {size}"
            yield [
                name,
                *_norms(run, row, "{s004_compat oracle_ssim:s2}"),
                at("{correlation_of_ssim_and_psnr:s2}", run, row),
            ]

    def small_inversion() -> Iterator[Sequence[str]]:
        yield [
            "Fashion-MNIST, LeNet; PSNR / SSIM in the paper's convention",
            "ours",
            "the paper",
            "ours, one to one and without tuning",
        ]
        place = ("cpu-small-tables", "inversion FMNIST, lenet")
        for algorithm in ALGORITHMS:
            forms = [at(form, *place, d=algorithm) for form in (THEIRS, BOTH)]
            yield [algorithm, forms[0], printed("FMNIST", algorithm), forms[1]]
        yield [
            "a test image of each class, no update",
            at(ORACLE, *place, f=CLASS),
            "",
            at(UNSEEN, *place, f="nearest of class"),
        ]

    def small_gradients() -> Iterator[Sequence[str]]:
        yield [
            "",
            *(
                word
                for attack in ("iDLG", "CPL")
                for word in (f"{attack}: uniform", f"{attack}: class images", "the paper")
            ),
        ]
        scores = reference["gradients"]["FMNIST lenet"]
        for algorithm in ALGORITHMS:
            line = [algorithm]
            for attack in ("iDLG", "CPL"):
                name, theirs = f"{attack}, {algorithm}", scores[attack][algorithm]
                line += [at(THEIRS, "cpu-small-tables", "gradients FMNIST, lenet", a=name)]
                line += [at(THEIRS, "cpu-small-class-start", "gradients FMNIST, lenet, from class images", a=name)]
                line += [f"{theirs['psnr']:.1f} / {number(theirs['ssim'], 's3')}"]
            yield line

    def performance() -> Iterator[Sequence[str]]:
        yield ["", "accuracy, %", "loss", "the paper", "small", "small, CIFAR-10"]
        for name, algorithm in (
            ("FedAVG, rate 0.001", "FedAVG"),
            ("SecAdam, rate 0.001", "SecAdam"),
            ("FedAVG, rate 0.1 (ours)", "FedAVG, lr 0.1"),
            ("SecLion (ours)", "SecLion"),
        ):
            row = "performance FMNIST, lenet"
            ours = [at(form, "h200-performance", row, d=algorithm) for form in ("{accuracy:.1f}", "{loss:.3f}")]
            scores = [e for e in reference["performance"] if (e["dataset"], e["algorithm"]) == ("FMNIST", algorithm)]
            paper = f"{scores[0]['accuracy']:.1f}, {scores[0]['loss']:.3f}" if scores else ""
            small = at("{accuracy:.1f}", "cpu-small-performance", row, d=algorithm)
            colour = at("{accuracy:.1f}", "cpu-small-performance-colour", "performance CIFAR-10, convnext", d=algorithm)
            yield [name, *ours, paper, small, colour]

    def grid() -> Iterator[Sequence[str]]:
        noises = (0.001, 0.005, 0.01)
        yield ["accuracy, %: ours (the paper's; the small run's)", *(f"noise {noise}" for noise in noises)]
        for name, key in (("DP-FedAVG", "dp_fedavg"), ("DP-SecAdam", "dp_secadam")):
            for clip in (1, 5, 10):
                line = [f"{name}, C = {clip}"]
                for noise in noises:
                    cell, row = f"{name}, clip {clip}, noise {noise}", f"grid FMNIST, cnn, clip {clip}"
                    wanted = ("FMNIST", clip, noise)
                    [paper] = [e for e in reference[key] if (e["dataset"], e["clip"], e["noise scale"]) == wanted]
                    ours, small = (at("{accuracy:.1f}", f"{run}-grid", row, d=cell) for run in ("h200", "cpu-small"))
                    line += [f"{ours} ({paper['accuracy']:.1f}; {small})"]
                yield line

    small_rows = {
        "LeNet (DLG), CIFAR-10, untrained": "cifar10, lenet-zhu, untrained",
        "LeNet, Fashion-MNIST, untrained": "fashion-mnist, lenet, untrained",
        "trained": "fashion-mnist, lenet, trained",
    }
    full_rows = {
        f"{name}, {kind}": f"{row}, {kind}"
        for name, row in (
            ("LeNet (DLG), CIFAR-10", "cifar10, lenet-zhu"),
            ("LeNet, Fashion-MNIST", "fashion-mnist, lenet"),
            ("CNN, CIFAR-10", "cifar10, cnn"),
        )
        for kind in ("untrained", "trained")
    }
    names = list(INVERTED)
    return {
        "labels, small": lambda: labels("cpu-small-labels", small_rows),
        "labels": lambda: labels("h200-labels", full_rows),
        "cosines": cosines,
        "clients, small": few_clients,
        "one client, small": one_client,
        "clients, CIFAR-10": lambda: cohorts("h200-clients", "clients cifar10"),
        "clients, Fashion-MNIST": lambda: cohorts("h200-clients-fmnist", "clients fashion-mnist"),
        "rounds": rounds,
        "state, one image": lambda: tracked("cpu-small-state", "1"),
        "state, eight images": lambda: tracked("cpu-small-state", "8"),
        "estimates": estimates,
        "SecLion": lion,
        "inverted": inverted,
        "exact": exact,
        "inversion, Fashion-MNIST": lambda: inversion(names[:2]),
        "inversion, ConvNeXt": lambda: inversion(names[2:6]),
        "inversion, ResNetV2": lambda: inversion(names[6:]),
        "gradients, CNN": lambda: gradients("h200-gradients", "cnn"),
        "gradients, LeNet": lambda: gradients("h200-gradients-lenet", "lenet"),
        "ablation": ablation,
        "inversion, small": small_inversion,
        "gradients, small": small_gradients,
        "performance": performance,
        "grid": grid,
        "ablation, small": small_ablation,
    }
