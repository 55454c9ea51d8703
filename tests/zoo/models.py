"""The table of models: each with a task and data of its kind, as a client's own code would have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradleak as gl
from gradleak.data.records import RawTable, TableSpec, encode
from gradleak.scenario.kinds import Series
from zoo import others, vision
from zoo.others import LENGTH, VOCABULARY

COUNT = 12  # examples of every client: a target, an unrelated client, and a gallery


@dataclass(frozen=True, eq=False)
class Victim:
    """What is audited: a task, and data in any form that audits take. `batch`: some of them by field."""

    task: gl.Task
    data: Any
    given: tuple[str, ...] = ()


Make = Callable[[], Victim]
ZOO: dict[str, Make] = {}


def entry(name: str) -> Callable[[Make], Make]:
    """Add a model to the zoo. Random numbers are the same every time."""

    def add(make: Make) -> Make:
        def seeded() -> Victim:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return make()

        ZOO[name] = seeded
        return seeded

    return add


def victim(name: str) -> Victim:
    """A model of the zoo, newly made."""
    return ZOO[name]()


def images(side: int = 16, count: int = COUNT) -> Tensor:
    return torch.rand(count, 3, side, side)


def classes(number: int) -> Tensor:
    return torch.arange(COUNT) % number


def texts() -> Tensor:
    return torch.randint(1, VOCABULARY, (COUNT, LENGTH))


def supervised(model: nn.Module, x: Tensor, y: Tensor, loss: Any = F.cross_entropy, **settings: Any) -> Victim:
    return Victim(gl.Task.supervised(model, loss, like=(x, y), **settings), (x, y))


# --- images -----------------------------------------------------------------------------------------------------------


def of_timm(name: str, train: bool = False) -> Victim:
    model, side = vision.timm_model(name)
    x, y = images(side), classes(vision.CLASSES)
    task = gl.Task.supervised(model.train(train), F.cross_entropy, like=(x, y), mean=(0.5, 0.4, 0.4), std=0.25)
    names = tuple(map(str, range(vision.CLASSES)))
    return Victim(task, gl.data.Images(x, y, vision.CLASSES, names, "made here"))


for each in vision.BY_HAND:
    entry(each)(lambda each=each: of_timm(each))  # type: ignore[misc]
entry("resnet18-training")(lambda: of_timm("resnet18", train=True))


@entry("flower-quickstart")
def flower_quickstart() -> Victim:
    dataset = TensorDataset(2 * images(32) - 1, classes(10))
    task = gl.Task.supervised(
        vision.FlowerNet(), nn.CrossEntropyLoss(), like=dataset[:2], mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )
    return Victim(task, DataLoader(dataset, batch_size=4, shuffle=True))


@entry("image-mlp")
def image_mlp() -> Victim:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 4))
    return supervised(model, images(8), classes(4))


@entry("unet-segmentation")
def unet() -> Victim:
    return supervised(vision.UNet(3), images(8), torch.randint(0, 3, (COUNT, 8, 8)))


@entry("multi-label")
def multi_label() -> Victim:
    tags = torch.rand(COUNT, 5).gt(0.5).float()
    return supervised(others.Tiny(5), images(), tags, nn.BCEWithLogitsLoss())


@entry("single-logit")
def single_logit() -> Victim:
    return supervised(others.Tiny(1), images(), classes(2).float(), F.binary_cross_entropy_with_logits)


@entry("weighted-smoothed")
def weighted() -> Victim:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), label_smoothing=0.1)
    return supervised(others.Tiny(4), images(), classes(4), loss)


@entry("dict-output")
def dict_output() -> Victim:
    return supervised(others.Wrapped(others.Tiny(4), "dict"), images(), classes(4))


@entry("tuple-output")
def tuple_output() -> Victim:
    return supervised(others.Wrapped(others.Tiny(4), "tuple"), images(), classes(4))


@entry("two-inputs")
def two_inputs() -> Victim:
    batch = {"image": images(), "meta": torch.randn(COUNT, 3), "label": classes(4)}
    task = gl.Task.supervised(others.ImageAndMeta(3), F.cross_entropy, like=batch, public=("meta",))
    return Victim(task, batch)


@entry("two-inputs-tuple")
def two_inputs_tuple() -> Victim:
    batch = ((images(), torch.randn(COUNT, 3)), classes(4))
    return Victim(gl.Task.supervised(others.ImageAndMeta(3), F.cross_entropy, like=batch), batch)


@entry("autoencoder")
def autoencoder() -> Victim:
    batch = {"x": images(8)}
    return Victim(gl.Task.from_batch(others.Autoencoder(), lambda out, b: F.mse_loss(out, b["x"]), batch), batch)


@entry("contrastive")
def contrastive() -> Victim:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    batch = {"x": torch.randn(COUNT, 6), "partner": torch.randn(COUNT, 4)}
    return Victim(gl.Task.from_batch(model, others.contrastive, batch, public=("partner",)), batch)


# --- tables -----------------------------------------------------------------------------------------------------------


def of_table(records: gl.data.Records, loss: Any) -> Victim:
    hidden = nn.Sequential(nn.Linear(records.kind.width, 12), nn.ReLU(), nn.Linear(12, records.classes or 1))
    task = gl.Task.supervised(hidden, loss, like=(records.x, records.y), kind=records.kind)
    return Victim(task, records[:40])


@entry("table-classification")
def table_classification() -> Victim:
    return of_table(gl.data.load("breast-cancer"), F.cross_entropy)


@entry("table-regression")
def table_regression() -> Victim:
    return of_table(gl.data.load("diabetes"), nn.MSELoss())


@entry("table-categories")
def table_categories() -> Victim:
    jobs, sexes = ("clerk", "nurse", "cook"), ("f", "m")
    columns: Mapping[str, Any] = {
        "age": [str(20 + 7 * n % 41) for n in range(20)],
        "job": [jobs[n % 3] for n in range(20)],
        "sex": [sexes[n // 2 % 2] for n in range(20)],
        "pay": ["high" if n % 5 < 2 else "low" for n in range(20)],
    }
    return of_table(encode(RawTable(columns), TableSpec(target="pay"), "made here"), F.cross_entropy)


def embedded(first: str, public: tuple[str, ...]) -> Victim:
    numbers, ids = torch.randn(COUNT, 4), torch.randint(0, 7, (COUNT, 2))
    inputs = {"numbers": numbers, "ids": ids}
    batch = {first: inputs.pop(first), **inputs, "label": classes(2)}
    model = others.EmbeddedColumns(7, 2, 4)
    return Victim(gl.Task.supervised(model, F.cross_entropy, like=batch, public=public), batch)


entry("embedded-columns")(lambda: embedded("ids", ()))
entry("embedded-columns-known")(lambda: embedded("numbers", ("ids",)))


# --- series -----------------------------------------------------------------------------------------------------------


def smooth(*shape: int) -> Tensor:
    return torch.randn(shape).cumsum(-1) / shape[-1] ** 0.5


@entry("series-lstm")
def series_lstm() -> Victim:
    x = smooth(COUNT, 2, 6).mT.contiguous()
    return supervised(others.RecurrentSeries(2), x, classes(3), kind=Series(time_first=True))


@entry("series-cnn")
def series_cnn() -> Victim:
    return supervised(others.series_cnn(2, 3).eval(), smooth(COUNT, 2, 10), classes(3))


@entry("series-forecast")
def series_forecast() -> Victim:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2))
    return supervised(model, smooth(COUNT, 1, 12), torch.randn(COUNT, 2), nn.HuberLoss())


@entry("audio-cnn")
def audio_cnn() -> Victim:
    return supervised(others.audio_cnn(), smooth(COUNT, 1, 32).clamp(-1, 1), classes(3), bounds=(-1.0, 1.0))


# --- text -------------------------------------------------------------------------------------------------------------


@entry("text-lstm")
def text_lstm() -> Victim:
    return supervised(others.RecurrentText(nn.LSTM), texts(), classes(3))


@entry("text-gru")
def text_gru() -> Victim:
    return supervised(others.RecurrentText(nn.GRU), texts(), classes(3))


TINY = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "pad_token_id": 0, **TINY}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 12, "n_layer": 1, "n_head": 2}


def hugging_face(model: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers as it is built, in evaluation mode: its dropout is off."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `zoo`)")
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


def of_batch(model: nn.Module, batch: dict[str, Tensor]) -> Victim:
    return Victim(gl.Task.supervised(model, F.cross_entropy, like=batch), batch)


@entry("bert-classifier")
def bert_classifier() -> Victim:
    ids = texts()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": classes(3)}
    return of_batch(hugging_face("BertForSequenceClassification", "BertConfig", num_labels=3, **BERT), batch)


@entry("bert-masked")
def bert_masked() -> Victim:
    ids = texts()
    labels = torch.full_like(ids, -100)
    labels[:, 2] = ids[:, 2]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return of_batch(hugging_face("BertForMaskedLM", "BertConfig", **BERT), batch)


def gpt2() -> nn.Module:
    return hugging_face("GPT2LMHeadModel", "GPT2Config", bos_token_id=0, eos_token_id=0, **GPT2)


@entry("gpt2")
def gpt2_language_model() -> Victim:
    ids = texts()
    return of_batch(gpt2(), {"input_ids": ids, "labels": ids})


@entry("gpt2-untied")
def gpt2_untied() -> Victim:
    ids = texts()
    model = hugging_face(
        "GPT2LMHeadModel", "GPT2Config", bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, **GPT2
    )
    return of_batch(model, {"input_ids": ids, "labels": ids})


@entry("gpt2-lora")
def gpt2_lora() -> Victim:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra `zoo`)")
    ids = texts()
    adapter = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), adapter).eval()
    return of_batch(model, {"input_ids": ids, "labels": ids})


@entry("hf-vit")
def hf_vit() -> Victim:
    model = hugging_face("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=8, num_labels=4, **TINY)
    return of_batch(model, {"pixel_values": images(), "labels": classes(4)})


@entry("hf-resnet")
def hf_resnet() -> Victim:
    settings = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    model = hugging_face("ResNetForImageClassification", "ResNetConfig", num_labels=4, **settings)
    return of_batch(model, {"pixel_values": images(), "labels": classes(4)})


# --- hard ones --------------------------------------------------------------------------------------------------------


@entry("dropout")
def dropout() -> Victim:
    return supervised(others.Tiny(4, dropout=0.3).train(), images(), classes(4))


@entry("batch-norm-of-one")
def batch_norm_of_one() -> Victim:
    """BatchNorm of one value per channel: a batch of one example has no statistics."""
    model = nn.Sequential(nn.Conv2d(3, 4, 16), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(4, 4))
    return supervised(model, images(), classes(4))


@entry("branches")
def branches() -> Victim:
    return supervised(others.Branches(4), images(), classes(4))


@entry("own-kernel")
def own_kernel() -> Victim:
    return supervised(others.OwnKernel(4), images(), classes(4))


@entry("own-kernel-once")
def own_kernel_once() -> Victim:
    return supervised(others.OwnKernel(4, once=True), images(), classes(4))
