"""Which rows and flags of `papers/*/run.py` each scale of `gradleak reproduce` has: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Calls of one `run.py`, by their options; which data they need (by name), and what they took."""

    runs: tuple[str, ...]
    cost: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A folder of `papers/`, and its scales."""

    title: str
    smoke: Scale | None  # does it run? Under a minute on one core; none where not even one row is over by then
    small: Scale  # minutes on a CPU: which way it points
    paper: Scale  # the settings of the stored figures, for a GPU; only here do the bounds count


PHOTOGRAPHS = "--data photographs --public cifar100-samples"
WORK = "runs/reproduce"
GPU = "one GPU; on an H200 each line was meant for ten minutes"

# Smoke takes images that packages bring.
# Costs of smoke: measured on one busy core. Costs of small: the seconds of the stored run with these settings.
PAPERS: dict[str, Paper] = {
    "flat_minima": Paper(
        "Flat minima as a defence: FedSAM, FedASAM, FedGF, FedSAI",
        smoke=Scale(
            (
                f"--small 1 --lpips 0 {PHOTOGRAPHS} --images 2 --steps 20 --rounds 2 --attacks ig"
                f" --only '^table, round 0$' --work {WORK}/flat_minima-smoke",
            ),
            "13 s",
            ("photographs",),
        ),
        small=Scale(
            (
                r"--only '^(train (FedAvg|FedSAM)|rho 0\.2|init torch)$' --budget 2000 --images 2 --steps 800"
                " --rounds 4 --attacks idlg,ig --eta 0.9 --curved 20 --probes 3 --lanczos 40"
                f" --work {WORK}/flat_minima-small",
            ),
            "13 minutes",
            ("cifar10", "cifar100"),
        ),
        paper=Scale(
            (
                "--only '^train (FedAvg|FedSAM|FedASAM|FedGF|FedSAI)$'",
                "--only '^table, round 0'",
                "--only '^exact, round 0'",
                "--only '^table, round 100'",
                "--only '^table, round 200'",
                "--only '^exact, round 100' --exact 4",
                "--only '^exact, round 200' --exact 4",
                "--only '^(init|eta)'",
                "--only '^(train FedAvg, long|long FedAvg|batch)'",
                "--only '^(train )?rho' --steps 2400",
                "--only '^curve FedAvg' --steps 2400",
                "--only '^information'",
            ),
            GPU,
            ("cifar10", "cifar100"),
        ),
    ),
    "gidm": Paper(
        "GIDM: gradient inversion of federated diffusion models (Huang, Hong, Roos, Chen, ARES 2025)",
        smoke=Scale(
            (
                "--small 1 --data cifar10-samples --only '^known, cifar10 32, r0, t 200$' --methods dlg-dm"
                f" --work {WORK}/gidm-smoke",
            ),
            "10 s",
        ),
        small=Scale(
            (
                "--small 1 --rounds 30 --generative 30 --fine 150 --sampler 4 --budget 500 --only '^(train cifar10 32$"
                "|steps, cifar10 32|known, cifar10 32, r0, t (10|200)$|unknown, cifar10 32, r0, t 10$)'"
                f" --work {WORK}/gidm-small",
            ),
            "10 minutes",
            ("cifar10",),
        ),
        paper=Scale(
            (
                "--only '^train cifar10 32$'",
                "--only '^steps'",
                "--only '^known, cifar10 32, r0' --methods 'dlg-dm;invg-dm;second-order'",
                "--only '^known, cifar10 32, trained' --methods 'dlg-dm;invg-dm;second-order'",
                "--only '^cost'",
                "--only '^known, cifar10 32, trained, t (50|200)$'",
                "--only '^unknown, cifar10 32, trained'",
                "--only '^(train|known|unknown).*celeba64 32'",
            ),
            GPU,
            ("cifar10", "celeba64"),
        ),
    ),
    "idlg": Paper(
        "iDLG: improved deep leakage from gradients (Zhao, Mopuri, Bilen, 2020)",
        smoke=Scale(("--data cifar10-samples --images 2 --steps 100 --restarts 1",), "8 s"),
        small=Scale(("--data cifar10-samples --images 4 --steps 1500 --restarts 2",), "a minute or two"),
        paper=Scale(("--data cifar10",), "one GPU, minutes", ("cifar10",)),
    ),
    "ig": Paper(
        "IG: inverting gradients (Geiping, Bauermeister, Droege, Moeller, NeurIPS 2020)",
        smoke=Scale(("--data cifar10-samples --images 1 --steps 10",), "10 s"),
        small=Scale(("--data cifar10-samples --images 1 --steps 200",), "a minute or two"),
        paper=Scale(("--data cifar10",), "one GPU, minutes", ("cifar10",)),
    ),
    "ilrg": Paper(
        "iLRG: label counts from gradients (Ma et al., ICLR 2023)",
        smoke=Scale(("--data cifar100-samples --examples 16 --trials 10",), "5 s"),
        small=Scale(("--data cifar100-samples --examples 16 --trials 200",), "under two minutes"),
        paper=Scale(("--data cifar100",), "one CPU core, a minute or two", ("cifar100",)),
    ),
    "nl_sme": Paper(
        "NL-SME: surrogates of many local steps (arXiv 2509.22082)",
        smoke=Scale(
            (
                "--small 1 --clients 1 --steps 20 --data cifar100-samples --letters mnist-samples"
                " --only '^table cifar100, E 20, B 10$'",
            ),
            "12 s",
        ),
        small=Scale(
            (
                "--small 1 --clients 4 --steps 200 --budget 1250"
                " --only '^(table|coarse) (cifar100|letters), E 20, B 10$'",
            ),
            "15 minutes",
            ("cifar100", "emnist-letters"),
        ),
        paper=Scale(
            (
                "--only '^(table (cifar100|letters), E 20, B 10|lanes cifar100, sme)'",
                "--only '^coarse cifar100, E 20, B 10'",
                "--only '^coarse cifar100, E 50, B 10'",
                "--only '^coarse letters, E (20|50), B 10'",
                "--only '^table .*(E 50, B 10|B 20)'",
                "--only '^(ablation|frozen)'",
                "--only '^trajectory'",
                "--only '^(original|enhanced)'",
                "--only '^(dlfa memory|labels|lanes)'",
            ),
            GPU,
            ("cifar100", "emnist-letters"),
        ),
    ),
    "priors": Paper(
        "Generators as priors: GIAS (NeurIPS 2021), GGL (CVPR 2022), GIFD (ICCV 2023)",
        smoke=Scale(("--small 1 --data cifar10-samples --images 2 --only '^prior in'",), "11 s"),
        small=Scale(("--small 1 --data cifar10-samples --only '^(prior|cost|defended)'",), "under two minutes"),
        paper=Scale(
            (
                "--generator cifar10.safetensors --only '^prior in'",
                "--generator cifar10.safetensors --only '^cost'",
                "--generator cifar10.safetensors --only '^defended'",
                "--generator cifar10.safetensors --only '^prior wrong'",
            ),
            f"{GPU}; first train cifar10.safetensors with `gradleak prior train`",
            ("cifar10",),
        ),
    ),
    "secadam": Paper(
        "SecAdam and SecLion under secure aggregation (Lewis, Varadharajan, Noman, 2024)",
        smoke=Scale(
            ("--small 1 --data cifar10-samples --runs 2 --only '^labels cifar10, lenet-zhu, untrained$'",), "10 s"
        ),
        small=Scale(
            ("--small 1 --runs 10 --trained 200 --only '^labels (cifar10, lenet-zhu|fashion)'",),
            "two minutes",
            ("cifar10", "fashion-mnist"),
        ),
        paper=Scale(
            (
                "--budget 20000 --only '^clients' --runs 8 --steps 2000",
                "--budget 20000 --only '^(exact|rounds|state)' --runs 8",
                "--budget 20000 --only '^labels' --runs 100",
                "--budget 20000 --only '^inversion FMNIST'",
                "--budget 20000 --only '^gradients FMNIST'",
                "--budget 20000 --only '^inversion .*, convnext'",
                "--budget 20000 --only '^ablation' --runs 100 --trained 12500",
                "--budget 20000 --only '^performance'",
                "--budget 20000 --only '^grid FMNIST'",
                "--budget 20000 --only '^inversion .*, resnetv2'",
                "--budget 20000 --only '^gradients (CIFAR|SVHN)' --runs 8",
                "--budget 20000 --only '^gradients Tiny' --runs 8",
                "--budget 20000 --only '^grid (CIFAR|SVHN|Tiny)'",
            ),
            "one GPU; by estimate some fourteen hours of an H200 in all, the first five lines an hour and a half",
            ("cifar10", "cifar100", "fashion-mnist", "svhn", "tiny-imagenet"),
        ),
    ),
    "second_order": Paper(
        "Second order: exact recovery (gradleak's own)",
        smoke=Scale(("--data cifar10-samples --size 8 --images 1 --only '^sigmoid, torch init$'",), "7 s"),
        small=Scale(
            ("--only '^sigmoid, torch init$' --images 1 --budget 9999",),
            "more than three minutes: one image was not finished then",
            ("cifar10-mini",),
        ),
        paper=Scale(
            (
                r"--only '^(sigmoid, U\(\+-0.5\)|(sigmoid|tanh|gelu|softplus|elu), torch init|FedA?SAM rho 0..)$'",
                "--only '^(sigmoid, trained|FedAvg, 4 steps over 2 images|two images|four images)$'",
                "--only 'float32 weights'",
                "--only '^(noise|relu, torch init)'",
                "--only '^(relu|gelu), [0-9]+ steps'",
                "--only '^(convnet|resnet18)'",
            ),
            GPU,
            ("cifar10-mini",),
        ),
    ),
    "tableak": Paper(
        "TabLeak: tabular data leakage (Vero, Balunovic, Dimitrov, Vechev, ICML 2023)",
        smoke=Scale(
            ("--batches 2 --steps 20 --only '^breast-cancer 100, 8 rows, untrained, one step, labels known$'",), "5 s"
        ),
        small=Scale(("--only '^breast-cancer 100, .* one step'",), "two minutes"),
        paper=Scale(("--only .",), "two CPU cores, about 15 minutes; adult.data in GRADLEAK_DATA"),
    ),
    "tip": Paper(
        "TIP: targeted interpretable perturbation (Wang and Su, arXiv 2602.11633)",
        smoke=Scale(
            (
                "--small 1 --images 1 --steps 20 --rounds 2 --trained 10 --noises 1 --data cifar10-samples"
                " --only '^table cifar10$'",
            ),
            "13 s",
        ),
        small=Scale(
            ("--small 1 --images 4 --steps 500 --trained 300 --only '^(table cifar10(, labels given)?|sweep beta)$'",),
            "7 minutes",
            ("cifar10",),
        ),
        paper=Scale(
            (
                "--only '^table cifar100?$'",
                "--only '^table (cifar10, |tiny-imagenet|lenet$)'",
                "--only '^table lenet, second' --images 4",
                "--only '^sweep'",
                "--only '^(accuracy cifar10, pre|maps cifar10,)'",
                "--only '^(accuracy|maps) cifar100|scratch' --rounds 60",
            ),
            GPU,
            ("cifar10", "cifar100", "tiny-imagenet"),
        ),
    ),
}
