"""Data of the user's own in files: one test of every format, and damaged files, which are told in one line."""

import gzip
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from data_setup import one_line, pictures
from lamina.base.errors import BadInput, MissingExtra
from lamina.data import Dataset, as_dataset, load
from lamina.data.readers.own import as_splits

ROWS = """age,weight,colour,clinic,part,grade
30,70.5,red,north,train,mild
40,80.5,blue,south,train,severe
50,60.5,red,north,test,mild
60,90.5,green,west,train,mild
70,50.5,blue,west,test,severe
"""
TABLE = {"path": "rows.csv", "label": "grade", "client": "clinic", "split": "part", "categorical": ["colour"]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(name, **options):
    with pytest.raises(BadInput) as refused:
        load(name, **options)
    return one_line(refused)


# --- table -----------------------------------------------------------------------------------------------------------


def test_a_table_has_numbers_categories_classes_and_clients(folder):
    (folder / "rows.csv").write_text(ROWS)
    train, test = load("table", **TABLE)
    assert train.x.dtype == torch.float32
    assert train.x.tolist() == [[30, 70.5, 0, 0, 1], [40, 80.5, 1, 0, 0], [60, 90.5, 0, 1, 0]]  # blue, green, red
    assert (train.y.tolist(), test.y.tolist(), test.class_names) == ([0, 1, 0], [0, 1], ("mild", "severe"))
    assert train.columns["clinic"].tolist() == ["north", "south", "west"]
    (folder / "rows.csv.gz").write_bytes(gzip.compress(ROWS.encode()))
    assert load("table", **TABLE | {"path": "rows.csv.gz"}).test.y.tolist() == [0, 1]


def test_a_table_for_regression_with_a_held_out_fraction(folder):
    (folder / "rows.csv").write_text(ROWS)
    options = {"path": "rows.csv", "label": "weight", "features": ["age"], "standardise": True, "test": 0.4}
    train, test = load("table", **options)
    assert (train.classes, len(train), len(test), train.y.dtype) == (None, 3, 2, torch.float32)
    assert abs(float(train.x.mean())) < 1e-6
    assert abs(float(train.x.std(correction=0)) - 1) < 1e-6
    assert torch.equal(load("table", **options).test.y, test.y)
    whole = load("table", path="rows.csv", label="age", features=["weight"], test=0.4, task="regression")
    assert whole.train.classes is None
    assert set(whole.train.y.tolist() + whole.test.y.tolist()) == {30.0, 40.0, 50.0, 60.0, 70.0}


def test_a_parquet_table_and_a_file_of_test_data(folder):
    pytest.importorskip("pyarrow")
    import pandas

    frame = pandas.DataFrame({"x": [1.0, 2.0, 3.0], "y": [3, 7, 3], "who": [1, 1, 2]})
    frame.to_parquet(folder / "train.parquet")
    frame[:1].to_parquet(folder / "test.parquet")
    train, test = load("table", path="train.parquet", test="test.parquet", label="y", client="who")
    assert (train.y.tolist(), train.class_names, test.x.tolist()) == ([0, 1, 0], ("3", "7"), [[1.0]])
    assert train.columns["who"].tolist() == [1, 1, 2]
    content = (folder / "train.parquet").read_bytes()
    (folder / "train.parquet").write_bytes(content[: len(content) // 2])
    assert "not a readable Parquet file" in refusal("table", path="train.parquet", label="y")


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("", {}, "not a readable CSV file"),
        ("age,grade,part,clinic,colour\n", {}, "has no rows"),
        (ROWS, {"label": "grad"}, "no column 'grad' (data.label); did you mean 'grade'?"),
        (ROWS, {"client": "hospital"}, "no column 'hospital' (data.client)"),
        (ROWS, {"split": "parts"}, "no column 'parts' (data.split); did you mean 'part'?"),
        (ROWS, {"split": "grade"}, "must say 'train' or 'test', found 'mild'"),
        (ROWS, {"categorical": []}, "column 'colour' holds no number in row 1 (counted from 1 below the header), "
         "'red', and 4 other rows: "),
        (ROWS.replace("40,", "n/a.,"), {}, "column 'age' holds no number in row 2 (counted from 1 below the header), "
         "'n/a.': correct it or drop the row, list the column in data.categorical, or leave it out"),
        (ROWS.replace("green,west", "green,"), {}, "column 'clinic' has a missing value in row 4 (counted from 1 below "
         "the header): fill it, or drop the row"),
        (ROWS, {"features": ["age", "grade"]}, "'grade' is a feature and has another role"),
        (ROWS, {"test": 0.2}, "data.test and data.split both say"),
        (ROWS, {"split": None, "test": 0.01}, "leaves the training or the test data empty"),
        (ROWS, {"task": "regression"}, "the label holds text"),
        (ROWS, {"path": "nowhere.csv"}, "there is no file or folder"),
        (ROWS, {"path": "."}, "is a folder"),
        (ROWS.replace("70,50.5,blue,west,test,severe", "70,50.5,blue,west,test,fatal"), {},
         "the class 'fatal' appears only in the test data"),
        (ROWS[:-20], {}, "column 'part' has a missing value in row 5 (counted from 1 below the header): "),  # it is cut
        (ROWS.replace("80.5", "inf").replace("90.5", "-inf"), {"standardise": True},
         "column 'weight' has an infinite value in row 2 (counted from 1 below the header), and 1 other row: "),
        (ROWS.replace(",", ";"), {}, "no column 'grade' (data.label) (columns: age;weight;"),
        (ROWS.replace("red", "wei\xdf"), {}, "not a readable CSV file in UTF-8"),
        (ROWS.encode("utf-16").decode("latin-1"), {}, "not a readable CSV file in UTF-8"),
        (ROWS + "1,2,3,4,5,6,7,8\n", {}, "not a readable CSV file"),
        (ROWS.replace("test", "train"), {}, "there are no test data"),
        ("\x00\xff", {}, ""),
    ],
)  # fmt: skip
def test_damaged_and_wrong_tables(folder, content, options, expected):
    (folder / "rows.csv").write_bytes(content.encode("latin-1"))
    given = {key: value for key, value in (TABLE | options).items() if value is not None}
    assert expected in refusal("table", **given)


def test_the_row_numbers_that_pandas_saves_are_no_feature(folder, caplog):
    numbered = [f"{'' if i == 0 else i + 6},{line}" for i, line in enumerate(ROWS.splitlines())]
    (folder / "rows.csv").write_text("\n".join(numbered))
    train = load("table", **TABLE).train
    assert train.x[0].tolist() == [30, 70.5, 0, 0, 1]
    assert "rows.csv: the first column has no name and holds row numbers" in caplog.text
    assert load("table", **TABLE | {"features": ["Unnamed: 0"]}).train.x[:, 0].tolist() == [7, 8, 10]
    (folder / "rows.csv").write_text("\n".join(line.replace(",", ".5,", 1) for line in numbered).replace(".5,", ",", 1))
    assert load("table", **TABLE).train.x[:, 0].tolist() == [7.5, 8.5, 10.5]  # these are no row numbers


def test_a_truncated_gzip_table(folder):
    (folder / "rows.csv.gz").write_bytes(gzip.compress(ROWS.encode() * 50)[:60])
    assert "not a readable CSV file" in refusal("table", **TABLE | {"path": "rows.csv.gz"})


def test_test_data_need_the_columns_of_the_training_data(folder):
    (folder / "a.csv").write_text("x,y\n1,0\n2,1\n")
    (folder / "b.csv").write_text("x,z\n1,0\n")
    assert "b.csv has no column 'y', which a.csv has" in refusal("table", path="a.csv", test="b.csv", label="y")
    (folder / "b.csv").write_text("x,y\n1,0\n?,1\n")
    with pytest.raises(BadInput, match=r"^b\.csv: column 'x' holds no number in row 2 .*, '\?':") as refused:
        load("table", path="a.csv", test="b.csv", label="y")
    assert "?" not in refused.value.without_data  # which a federation's server may read


# --- images ----------------------------------------------------------------------------------------------------------


def save_pictures(folder, **modes):
    for place, mode in modes.items():
        for number, picture in enumerate(pictures(*mode)):
            (folder / place).mkdir(parents=True, exist_ok=True)
            picture.save(folder / place / f"{number}.png")


def test_a_folder_of_pictures_per_class(folder, caplog):
    save_pictures(folder / "pets" / "train", dog=["L", "L"], cat=["L"])
    save_pictures(folder / "pets" / "test", dog=["RGB"])
    (folder / "pets" / "train" / "dog" / "notes.txt").write_text("good dogs")
    train, test = load("images", path="pets")
    assert "pets/train/dog/notes.txt" in caplog.text
    assert (tuple(train.x.shape), train.x.dtype) == ((3, 3, 3, 4), torch.uint8)  # colour, because one picture has it
    assert (train.y.tolist(), test.y.tolist(), train.class_names) == ([0, 1, 1], [1], ("cat", "dog"))
    parts = load("images", path="pets/train", test=0.34, size=[6, 5])
    assert tuple(parts.train.x.shape[1:]) == (1, 6, 5)
    assert len(parts.test) == 1


def test_damaged_pictures(folder):
    save_pictures(folder / "pets", dog=["L", "L"], cat=["L", "L"])
    assert "pets/cat' is not" not in refusal("images", path="pets/cat")
    assert "holds no folders" in refusal("images", path="pets/cat")
    assert "is not a folder" in refusal("images", path="pets/cat/0.png")
    picture = folder / "pets" / "cat" / "1.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    assert "1.png is not a readable picture" in refusal("images", path="pets")
    picture.write_bytes(b"")
    assert "1.png is not a readable picture" in refusal("images", path="pets")
    pictures("L", size=(9, 9))[0].save(picture)
    assert "data.size = [height, width] resizes those of files" in refusal("images", path="pets")
    (folder / "pets" / "bird").mkdir()
    assert "bird' holds no pictures" in refusal("images", path="pets")
    assert "must be a height and a width" in refusal("images", path="pets", size=[3])
    (folder / "pets" / "bird").rmdir()
    save_pictures(folder / "more", dog=["L"], cow=["L"])
    options = {"path": "pets", "test": "more", "size": [3, 4]}
    assert "the class 'cow' appears only in the test data" in refusal("images", **options)


# --- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays_with_test_data_of_their_own(folder):
    images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
    np.savez("a.npz", x_train=images, y_train=["b", "a", "b"], who_train=[7, 8, 7], x_test=images[:1], y_test=["a"],
             who_test=[8])  # fmt: skip
    train, test = load("arrays", path="a.npz", client="who")
    assert (tuple(train.x.shape), train.x.dtype) == ((3, 1, 4, 4), torch.uint8)
    assert (train.y.tolist(), test.y.tolist(), train.class_names) == ([1, 0, 1], [0], ("a", "b"))
    assert train.columns["who"].tolist() == [7, 8, 7]


def test_arrays_for_testing_need_no_clients(folder):
    x = np.zeros((3, 2))
    np.savez("a.npz", x_train=x, y_train=[0, 1, 0], site_train=["a", "b", "a"], x_test=x, y_test=[0, 0, 1])
    train, test = load("arrays", path="a.npz", client="site")
    assert (train.columns["site"].tolist(), dict(test.columns)) == (["a", "b", "a"], {})
    message = refusal("arrays", path="a.npz", client="sites")
    assert "a.npz (of its arrays, those with _train): there is no array 'sites'; did you mean 'site'?" in message
    assert "(arrays: x, y, site)" in message
    np.savez("b.npz", x=x, y=[0, 1, 0])  # the same without a client, in a file of its own
    np.savez("c.npz", x=x, y=[0, 1, 0], site=[1, 2, 1])
    assert load("arrays", path="c.npz", test="b.npz", client="site").train.columns["site"].tolist() == [1, 2, 1]


def test_safetensors_with_a_held_out_fraction(folder):
    x = np.linspace(0, 1, 20, dtype=np.float64).reshape(10, 2)
    save_file({"inputs": x, "targets": x[:, :1].copy(), "site": np.arange(10) % 3}, "a.safetensors")
    options = {"path": "a.safetensors", "features": "inputs", "label": "targets", "client": "site", "test": 0.3}
    train, test = load("arrays", **options)
    assert (train.x.dtype, train.y.dtype, train.classes, len(train), len(test)) == (
        torch.float32, torch.float32, None, 7, 3,
    )  # fmt: skip
    assert train.columns["site"].shape == (7,)


def test_damaged_arrays(folder):
    np.savez("a.npz", x=np.zeros((6, 2)), y=[0, 1, 0, 1, 0, 1], short=[1, 2])
    assert "no array 'label' (arrays: x, y, short)" in refusal("arrays", path="a.npz", label="label")
    assert "'short' has 2 rows, and 'x' has 6" in refusal("arrays", path="a.npz", client="short")
    whole = (folder / "a.npz").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no zip"):
        (folder / "b.npz").write_bytes(damaged)
        assert "is not a readable .npz file" in refusal("arrays", path="b.npz")
    np.savez("c.npz", x=np.zeros((0, 2)), y=np.zeros(0, np.int64))
    assert "'x' is empty" in refusal("arrays", path="c.npz")
    np.savez("d.npz", x=np.array([{}, []], dtype=object), y=[0, 1])
    assert "is not a readable .npz file" in refusal("arrays", path="d.npz")  # never unpickled
    np.savez("e.npz", x=np.zeros((1, 2)), y=[5])
    assert "the class '5' appears only in the test data" in refusal("arrays", path="a.npz", test="e.npz")
    np.savez("f.npz", x=np.zeros((1, 3)), y=[1])
    assert "are [2] float64 in the training data and [3] float64" in refusal("arrays", path="a.npz", test="f.npz")
    np.savez("f.npz", x=np.zeros((1, 2), np.uint8), y=[1])  # bytes of images beside floats
    assert "are [2] float64 in the training data and [2] uint8" in refusal("arrays", path="a.npz", test="f.npz")
    (folder / "g.safetensors").write_bytes(b"12345678")
    assert "is not a readable .safetensors file" in refusal("arrays", path="g.safetensors")
    (folder / "h.pt").write_bytes(b"")
    assert "neither a .npz nor a .safetensors" in refusal("arrays", path="h.pt")
    assert "leaves the training or the test data empty" in refusal("arrays", path="a.npz", test=1.5)
    np.savez("i.npz", x=np.array([0.0, 1.0, np.nan, 3.0])[:, None], y=[0, 1, 0, 1])
    nan = "i.npz: sample 2 of 'x' holds a NaN"  # counted in the file, not in the part that trains
    assert nan in refusal("arrays", path="i.npz")
    assert nan in refusal("arrays", path="a.npz", test="i.npz")


def test_arrays_with_several_targets_a_sample(folder):
    x, maps = np.zeros((5, 2), np.float32), np.array([[0, 255, 1]] * 5)
    np.savez(folder / "maps.npz", x=x, y=maps)
    assert load("arrays", path="maps.npz", ignore_index=255).train.y[0].tolist() == [0, -100, 1]
    assert load("arrays", path="maps.npz").train.classes == 256
    numbers = load("arrays", path="maps.npz", task="regression").train
    assert (numbers.classes, numbers.y.dtype, numbers.y[0].tolist()) == (None, torch.float32, [0.0, 255.0, 1.0])
    np.savez(folder / "labels.npz", x=x, y=maps > 0)
    assert load("arrays", path="labels.npz").train.y[0].tolist() == [0, 1, 1]


def test_a_missing_label_is_no_class_of_its_own():
    for y in (["u", float("nan"), "v"], ["u", None, "v"]):
        with pytest.raises(BadInput, match="sample 1 has no label"):
            Dataset(np.zeros((3, 2)), y)
    with pytest.raises(BadInput, match=r"training data of 'm:f': .*sample 1 has no label"):
        as_splits("m:f", ((np.zeros((2, 1)), np.array(["u", np.nan], object)), (np.zeros((1, 1)), ["u"])))


# --- packages ---------------------------------------------------------------------------------------------------------


def test_a_function_may_return_splits_of_the_installed_datasets_package():
    datasets = pytest.importorskip("datasets")
    rows = {"pixels": [[i, 0.5] for i in range(6)], "kind": ["cat", "dog"] * 3, "site": list("aabbab")}
    whole = datasets.Dataset.from_dict(rows)
    splits = [as_dataset(part, x="pixels", y="kind") for part in (whole, whole.select([1]))]
    train, test = as_splits("m:load", splits)
    assert (train.y.tolist(), test.y.tolist(), test.class_names) == ([0, 1] * 3, [1], ("cat", "dog"))
    assert train.columns["site"].tolist() == list("aabbab")
    missing = datasets.Dataset.from_dict(rows | {"kind": ["cat", None] * 3})
    with pytest.raises(BadInput, match="column 'kind' has no value in sample 1"):
        as_dataset(missing, x="pixels", y="kind")


def test_tables_and_pictures_without_the_packages(folder, monkeypatch):
    (folder / "rows.csv").write_text(ROWS)
    save_pictures(folder / "pets", dog=["L"], cat=["L"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[table\]'"):
        load("table", **TABLE)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[images\]'"):
        load("images", path="pets", test=0.5)
