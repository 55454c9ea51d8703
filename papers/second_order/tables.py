"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from papers.readme import Results, Tables

SHARE = "{above_60:%} %", "{above_100:%} %"
FLOAT = "; float32 weights, lr "


def tables(at: Results) -> Tables:
    def measured() -> Iterator[Sequence[str]]:
        head = ["network and client", "images", "mean", "median", "lowest", "above 60 dB", "above 100 dB"]
        yield [*head, "seconds an image", "IG beside, dB"]
        for name, run, row in (
            ("sigmoid, U(+-0.5)", "h200-a", "sigmoid, U(+-0.5)"),
            ("sigmoid", "h200-a", "sigmoid, torch init"),
            ("tanh", "h200-a", "tanh, torch init"),
            ("GELU", "h200-a", "gelu, torch init"),
            ("softplus", "h200-a", "softplus, torch init"),
            ("ELU", "h200-a", "elu, torch init"),
            ("sigmoid, trained for 20,000 steps", "h200-b", "sigmoid, trained"),
            ("FedSAM rho 0.2, rule known", "h200-a", "FedSAM rho 0.2"),
            ("FedASAM rho 0.3, rule known", "h200-a", "FedASAM rho 0.3"),
            ("FedAvg, 4 steps over 2 images, order and labels unknown", "h200-c", "FedAvg, 4 steps over 2 images"),
            ("two images", "h200-c", "two images"),
            ("four images", "h200-d", "four images"),
            ("ReLU, untrained, first half", "h200-e", "relu, torch init"),
            ("ReLU, untrained, second half", "h200-f", "relu, torch init"),
            ("noise of 0.001 of each tensor's RMS", "h200-g", "noise 0.001"),
            ("noise of 0.01", "h200-g", "noise 0.01"),
            ("noise of 0.1", "h200-g", "noise 0.1"),
        ):
            forms = ("{psnr:n}", "{psnr:.1f}", "{psnr median:.1f}", "{psnr lowest:.1f}", *SHARE)
            beside = at("{beside psnr:.1f}", run, row) if run in ("h200-d", "h200-e", "h200-f") else ""
            shared = run in ("h200-d", "h200-e", "h200-f", "h200-g")
            seconds = at("({seconds_per_image:.2g})" if shared else "{seconds_per_image:.2g}", run, row)
            yield [name, *(at(form, run, row) for form in forms), seconds, beside]

    def rounded() -> Iterator[Sequence[str]]:
        yield ["network", "images", "lr 1", "lr 0.1", "lr 0.01"]
        for name, row, runs in (
            ("sigmoid, U(+-0.5)", "sigmoid, U(+-0.5)", ("h200-g", "h200-c", "h200-g")),
            ("sigmoid, torch init", "sigmoid, torch init", ("", "h200-c", "")),
            ("tanh", "tanh, torch init", ("", "h200-c", "")),
            ("GELU", "gelu, torch init", ("", "h200-c", "")),
            ("softplus", "softplus, torch init", ("", "h200-c", "")),
            ("ELU", "elu, torch init", ("", "h200-c", "")),
            ("FedSAM", "FedSAM rho 0.2", ("", "h200-d", "")),
            ("FedASAM", "FedASAM rho 0.3", ("", "h200-d", "")),
            ("sigmoid, trained", "sigmoid, trained", ("", "h200-d", "")),
            ("two images", "two images", ("", "h200-k", "")),
            (
                "FedAvg, 4 steps over 2 images, order and labels unknown",
                "FedAvg, 4 steps over 2 images",
                ("", "h200-k", ""),
            ),
        ):
            cells = [at("{psnr:.1f}", run, f"{row}{FLOAT}{rate}") for run, rate in zip(runs, ("1", "0.1", "0.01"))]
            yield [name, at("{psnr:n}", runs[1], f"{row}{FLOAT}0.1"), *cells]

    def trained() -> Iterator[Sequence[str]]:
        steps = ("30", "100", "300", "1000")
        yield ["steps", *steps]
        for name, kind, form in (
            ("training loss of ReLU", "relu", "{training_loss:.2f}"),
            ("training loss of GELU", "gelu", "{training_loss:.2f}"),
            ("ReLU, dB", "relu", "{psnr:.1f}"),
            ("GELU, dB", "gelu", "{psnr:.1f}"),
        ):
            yield [name, *(at(form, "h200-h", f"{kind}, {count} steps") for count in steps)]

    def large() -> Iterator[Sequence[str]]:
        yield ["network", "images", "second order, dB", "match", "IG, dB", "match (a cosine)", "gain, dB"]
        for name, run, row in (
            ("ConvNet64, GELU", "h200-i", "convnet, gelu, matrix-free"),
            ("ConvNet64, ReLU (IG in 1.8 times the seconds)", "h200-k", "convnet, relu, matrix-free"),
            ("ResNet-18, GELU", "h200-i", "resnet18, gelu, matrix-free"),
        ):
            forms = ("{psnr:n}", "{psnr:.1f}", "{match:.2g}", "{beside psnr:.1f}", "{beside match:.1g}", "{gain:+.1f}")
            yield [name, *(at(form, run, row) for form in forms)]

    def floors() -> Iterator[Sequence[str]]:
        yield ["noise", "0.001", "0.01", "0.1"]
        rows = ("noise 0.001", "noise 0.01", "noise 0.1")
        yield ["below the floor, dB", *(at("{certificate below_floor:.1f}", "h200-g", row) for row in rows)]

    return {"measured": measured, "float32": rounded, "trained": trained, "large": large, "floors": floors}
