"""Tables, whose columns are the inputs and the target of a network."""

import numpy as np
import pandas
import pytest
import torch
import user_files
from user_files import every

from laplace_debias.sources import SourceSettings, load, split_by_seed
from laplace_debias.sources.table_files import read_table


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return user_files.networks(tmp_path, monkeypatch)


def table(rows=40):
    rng = np.random.default_rng(0)
    return pandas.DataFrame(
        {
            "age": rng.integers(20, 60, rows),
            "height": rng.normal(170, 10, rows),
            "constant": np.full(rows, 5.0),
            "price": rng.normal(size=rows),
            "kind": np.array(["red", "green"])[np.arange(rows) % 2],
        }
    )


def load_on_cpu(**options):
    options = {"model": "nets:rows", "device": "cpu", "progress": False} | options
    return load(SourceSettings(**options))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_features_are_standardised_by_the_training_rows(folder, suffix):
    data = table()
    path = folder / f"t.{suffix}"
    if suffix == "csv":
        data.to_csv(path, index=False)
    else:
        data.to_parquet(path)
    options = {
        "data": path,
        "target": "price",
        "features": ("height", "age", "constant"),
        "model_args": {"inputs": 3, "outputs": 1},
    }
    loaded = load_on_cpu(**options)
    train, _, test = (indices.numpy() for indices in split_by_seed(40))
    columns = data[["height", "age", "constant"]].to_numpy(float)
    mean = columns[train].mean(0)
    std = columns[train].std(0)
    expected = (columns - mean) / np.where(std > 0, std, 1)
    x, y = every(loaded.test)
    np.testing.assert_allclose(x.numpy(), expected[test], atol=1e-5)
    np.testing.assert_allclose(y[:, 0].numpy(), data["price"].to_numpy()[test], rtol=1e-6)
    assert (loaded.task, loaded.input_name, loaded.num_train) == ("regression", "row", 24)
    # The page shows the columns in their own units.
    shown = [loaded.row(row) for row in x]
    assert [list(row) for row in shown] == [["height", "age", "constant"]] * len(x)
    values = [list(row.values()) for row in shown]
    np.testing.assert_allclose(values, columns[test], rtol=1e-4, atol=1e-4)
    assert loaded.target == "price"
    raw, _ = every(load_on_cpu(**options, standardise=False).test)
    np.testing.assert_allclose(raw.numpy(), columns[test], rtol=1e-6)


def test_parts_in_a_folder_and_text_as_classes(folder):
    data = table().drop(columns="price")
    data_folder = folder / "parts"
    data_folder.mkdir()
    for split, rows in (("train", data[:20]), ("val", data[20:30]), ("test", data[30:])):
        rows.to_csv(data_folder / f"{split}.csv", index=False)
    loaded = load_on_cpu(data=data_folder, target="kind", model_args={"inputs": 3, "outputs": 2})
    assert loaded.classes == ("green", "red")
    assert loaded.task == "classification"
    _, y = every(loaded.test)
    assert [loaded.classes[label] for label in y] == data["kind"][30:].tolist()
    one_output = load_on_cpu(
        data=data_folder, target="kind", model_args={"inputs": 3, "outputs": 1}
    )
    assert one_output.task == "binary"


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_validation_rows_of_a_folder_are_found_by_any_usual_name(folder, name):
    data_folder = folder / "parts"
    data_folder.mkdir()
    for split, rows in {"train": slice(0, 20), name: slice(20, 29), "test": slice(29, 40)}.items():
        table().iloc[rows].drop(columns="kind").to_csv(data_folder / f"{split}.csv", index=False)
    loaded = load_on_cpu(data=data_folder, target="price", model_args={"inputs": 3, "outputs": 1})
    assert len(every(loaded.validation)[0]) == 9


def test_the_first_usual_name_of_validation_rows_counts(folder):
    data_folder = folder / "both"
    data_folder.mkdir()
    splits = {"train": (0, 20), "val": (20, 25), "validation": (25, 32), "test": (32, 40)}
    for split, (start, stop) in splits.items():
        table().iloc[start:stop].drop(columns="kind").to_csv(
            data_folder / f"{split}.csv", index=False
        )
    loaded = load_on_cpu(data=data_folder, target="price", model_args={"inputs": 3, "outputs": 1})
    assert len(every(loaded.validation)[0]) == 5


def test_out_of_distribution_rows_need_no_target(folder):
    data = table().drop(columns="kind")
    data.to_csv(folder / "t.csv", index=False)
    data[["age", "height", "constant"]][:7].to_csv(folder / "o.csv", index=False)
    loaded = load_on_cpu(
        data="t.csv",
        target="price",
        model_args={"inputs": 3, "outputs": 1},
        ood={"old": "o.csv"},
    )
    x, _ = every(loaded.ood["old"])
    x_train, _ = every(loaded.train)
    all_x = torch.cat([x_train, every(loaded.validation)[0], every(loaded.test)[0]])
    assert x.shape == (7, 3)
    distances = torch.cdist(x, all_x).min(1).values
    assert float(distances.max()) < 1e-3


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"target": None}, "Pass --target with one of age, height, constant, price, kind"),
        ({}, {"target": "prise"}, "no column prise. Did you mean price"),
        ({}, {"target": "price"}, "column kind of t.csv contains .*--features"),
        (
            {"age": [np.nan] + [1.0] * 39},
            {"features": ("age",)},
            "t.csv has missing or infinite values: 1 in age. The first is in data row 1.",
        ),
        ({"price": [1.0] * 39 + [np.nan]}, {"features": ("age",)}, r"1 in price\. .* data row 40"),
        (
            {"kind": ["red"] * 3 + [None] * 30 + ["blue"] * 7},
            {"target": "kind", "features": ("age",)},
            r"30 in kind\. The first is in data row 4",
        ),
        ({"price": range(40)}, {"features": ("age",)}, "24 different whole numbers, so the task"),
        ({}, {"features": ("agee",)}, "no column agee. Did you mean age"),
        ({}, {"features": ("price",)}, "target price is also one of the features"),
        ({}, {"features": ("age",), "task": "multilabel"}, "A table can have only one target"),
        ({}, {"target": "kind", "features": ("age",), "task": "regression"}, "needs numbers"),
        (
            {},
            {"features": ("age", "price"), "target": "kind"},
            r"shape \[2, 2\] .* For a table, pass the columns .* as --features\.",
        ),
        ({}, {"features": ("age",), "image_size": 3}, "image_size cannot be used with a table"),
    ],
)
def test_tables_that_cannot_be_used(folder, change, options, message):
    table().assign(**change).to_csv("t.csv", index=False)
    with pytest.raises(ValueError, match=message):
        load_on_cpu(**{"data": "t.csv", "target": "price", **options})


def test_missing_values_of_all_rows_and_columns_are_counted(folder):
    """Held-out rows count, too, and rows are numbered from 1, as a person counts them."""
    data = table(60)
    data.loc[4:39, "age"] = np.nan
    data.loc[2:59:3, "price"] = np.inf
    data.to_csv("t.csv", index=False)
    with pytest.raises(ValueError, match=r"36 in age, 20 in price. The first is in data row 3"):
        load_on_cpu(data="t.csv", target="price", features=("age", "height"))
    # They are also counted in a table of further inputs.
    table().to_csv("whole.csv", index=False)
    loaded = load_on_cpu(
        data="whole.csv",
        target="price",
        features=("age", "height"),
        model_args={"inputs": 2, "outputs": 1},
    )
    with pytest.raises(ValueError, match=r"t\.csv has missing .* 36 in age\. .* data row 5"):
        loaded.read("t.csv", "inputs")


def test_a_class_that_no_training_row_has(folder):
    data_folder = folder / "parts"
    data_folder.mkdir()
    data = table()[["age", "kind"]]
    data[:20].to_csv(data_folder / "train.csv", index=False)
    data[20:].replace("red", "blue").to_csv(data_folder / "test.csv", index=False)
    with pytest.raises(
        ValueError, match=r"test\.csv contains the value 'blue', which does not occur"
    ):
        load_on_cpu(data=data_folder, target="kind")


def test_files_that_are_no_tables(folder):
    (folder / "t.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"t\.parquet is damaged"):
        load_on_cpu(data="t.parquet", target="y")
    (folder / "t.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="has no rows"):
        load_on_cpu(data="t.csv", target="b")


def test_a_table_with_columns_of_the_same_name_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,a,,\n1,2,3,4,5\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"several columns with the same name: a\. Give each"):
        read_table(path)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_table_without_commas_is_refused_with_its_separator(tmp_path, separator):
    table().to_csv(tmp_path / "t.csv", sep=separator, index=False)
    with pytest.raises(ValueError, match=r"separated by .* Save it with commas") as raised:
        read_table(tmp_path / "t.csv")
    assert repr(separator) in str(raised.value)


def test_a_table_in_another_encoding_is_refused_with_the_one_that_is_read(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("größe,y\n1.0,2.0\n", encoding="cp1252")
    with pytest.raises(ValueError, match=r"d\.csv is not encoded in UTF-8 .* Save it in UTF-8"):
        read_table(path)
    path.write_text("größe,y\n1.0,2.0\n", encoding="utf-8")
    assert list(read_table(path)) == ["größe", "y"]


def test_arrays_of_further_inputs_are_in_the_units_of_the_table(folder):
    data = table().drop(columns="kind")
    data.to_csv(folder / "t.csv", index=False)
    features = data[["age", "height", "constant"]][:7]
    features.to_csv(folder / "rows.csv", index=False)
    np.savez(folder / "rows.npz", x=features.to_numpy(np.float32))
    loaded = load_on_cpu(
        data="t.csv",
        target="price",
        model_args={"inputs": 3, "outputs": 1},
        ood={"csv": "rows.csv", "npz": "rows.npz"},
    )
    torch.testing.assert_close(every(loaded.ood["npz"])[0], every(loaded.ood["csv"])[0])
    assert any("in the same units" in note for note in loaded.notes)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_names_of_classes_may_all_be_numbers_in_one_of_the_files(folder, suffix):
    data = table().drop(columns=["price", "kind"])
    data["group"] = np.array(["1", "2", "3a"])[np.arange(40) % 3]
    data_folder = folder / "parts"
    data_folder.mkdir()
    splits = {"train": data[:20], "test": data[20:].query("group != '3a'")}
    for split, rows in splits.items():
        if suffix == "csv":
            rows.to_csv(data_folder / f"{split}.csv", index=False)
        else:
            if split == "test":
                rows = rows.assign(group=rows["group"].astype(int))
            rows.to_parquet(data_folder / f"{split}.parquet")
    loaded = load_on_cpu(data=data_folder, target="group", model_args={"inputs": 3, "outputs": 3})
    assert loaded.classes == ("1", "2", "3a")
    _, y = every(loaded.test)
    assert [loaded.classes[label] for label in y] == splits["test"]["group"].tolist()
