"""Trains the victims of this folder: a CIFAR-10 ResNet-18, plainly or with SAM, and keeps it at several moments.

    python papers/spans/victims.py --out runs/victims [--sam 0.05] [--epochs 2,2,2] [--keep 1,6] [--threads 2]

The images may grow while it trains (16, 24, 32 pixels), which makes it affordable on two CPU cores; products are
bfloat16, weights float32, kept in half precision: the victim is the network with the rounded weights. It prints test
accuracy and writes `resnet18[-sam]-STEP.safetensors`, and a `.json` about all.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import gradleak as gl

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.247, 0.2435, 0.2616]).view(3, 1, 1)
SIZES = (16, 24, 32)
BATCH, RATE, DECAY = 128, 0.1, 5e-4
EARLY = (0, 30, 100)  # steps after which the network is kept, beside the end of every epoch


def normalised(x: Tensor) -> Tensor:
    return (x - MEAN.to(x)) / STD.to(x)


def augmented(x: Tensor, size: int) -> Tensor:
    """Each flipped and moved by up to an eighth by itself, at the size of this epoch."""
    down, right = torch.randint(0, 9, (2, len(x), 1), device=x.device)
    places = torch.arange(32, device=x.device)
    columns = torch.where(torch.rand(len(x), 1, device=x.device) < 0.5, 31 - places, places) + right
    image = torch.arange(len(x), device=x.device)[:, None, None]
    x = F.pad(x, (4, 4, 4, 4))[image, :, (places + down)[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
    return x if size == 32 else F.interpolate(x, size=(size, size), mode="area")


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(model(x).float(), y)


def sharpened(model: nn.Module, x: Tensor, y: Tensor, rho: float) -> list[Tensor]:
    """SAM: the gradient at the weights moved by rho along the normalised gradient."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss_of(model, x, y), parameters)
    length = torch.stack([g.norm() for g in first]).norm() + 1e-12
    moves = [g * (rho / length) for g in first]
    torch._foreach_add_([p.data for p in parameters], moves)
    second = list(torch.autograd.grad(loss_of(model, x, y), parameters))
    torch._foreach_sub_([p.data for p in parameters], moves)
    return second


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = [model(normalised(part)).argmax(1) == labels for part, labels in zip(x.split(250), y.split(250))]
    model.train()
    return float(torch.cat(right).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/victims"))
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--sam", type=float, default=0.0)
    parser.add_argument("--epochs", default="2,2,2", help="at 16, 24 and 32 pixels")
    parser.add_argument("--keep", default="", help="epochs after which the network is kept; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)

    data, test = gl.data.load(options.data, split="train"), gl.data.load(options.data, split="test", limit=2000)
    x, y = data.x.to(device), data.y.to(device)
    model = gl.models.resnet18(generator=torch.Generator().manual_seed(options.seed))
    model = model.to(device, memory_format=torch.channels_last).train()
    per_epoch = len(x) // BATCH
    sizes = [size for size, count in zip(SIZES, options.epochs.split(",")) for _ in range(int(count))]
    optimiser = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2 * RATE, total_steps=per_epoch * len(sizes) + 1)
    name = "resnet18-sam" if options.sam else "resnet18"
    log: list[dict[str, object]] = []
    began, step = time.time(), 0

    def keep(epoch: float) -> None:
        state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
        half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
        save_file(half, options.out / f"{name}-{step}.safetensors")
        model.load_state_dict(half)  # accuracy is that of the victim
        entry = {"step": step, "epoch": epoch, "accuracy": accuracy(model, test.x.to(device), test.y.to(device))}
        model.load_state_dict(state)
        log.append({**entry, "seconds": round(time.time() - began)})
        about = {"sam": options.sam, "epochs": options.epochs, "seed": options.seed, "images": len(x), "kept": log}
        (options.out / f"{name}.json").write_text(json.dumps(about, indent=1))
        print(log[-1], flush=True)

    for epoch, size in enumerate(sizes):
        for rows in torch.randperm(len(x), device=device)[: per_epoch * BATCH].split(BATCH):
            if step in EARLY:
                keep(step / per_epoch)
            batch = normalised(augmented(x[rows], size)).contiguous(memory_format=torch.channels_last)
            labels = y[rows]
            if options.sam:
                gradients = sharpened(model, batch, labels, options.sam)
            else:
                gradients = list(torch.autograd.grad(loss_of(model, batch, labels), list(model.parameters())))
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.grad = gradient
            optimiser.step()
            rate.step()
            step += 1
        if not options.keep or str(epoch + 1) in options.keep.split(","):
            keep(epoch + 1)


if __name__ == "__main__":
    main()
