"""Tables of the user's own in CSV and Parquet files: their columns, the types of their values, and damaged files."""

import gzip
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from data_setup import one_line, refusal
from lamina.base.errors import BadInput, MissingExtra
from lamina.data import load

ROWS = """age,weight,colour,clinic,part,grade
30,70.5,red,north,train,mild
40,80.5,blue,south,train,severe
50,60.5,red,north,test,mild
60,90.5,green,west,train,mild
70,50.5,blue,west,test,severe
"""
TABLE = {"path": "rows.csv", "label": "grade", "client": "clinic", "split": "part", "categorical": ["colour"]}
SEPARATE = {"path": "train.csv", "test": "test.csv", "label": "y", "categorical": ["c"]}


def write(path, **columns):
    rows = zip(*columns.values(), strict=True)
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in [tuple(columns), *rows]))


def write_categories(folder, train, test):
    """Write training and test files with a column of categories and two classes."""
    for name, values in (("train", train), ("test", test)):
        write(folder / f"{name}.csv", x=range(len(values)), c=values, y=[i % 2 for i in range(len(values))])


def one_hot(data):
    """Return which 0/1 feature of the column is set in each row; None: none of them."""
    return [row.index(1) if 1 in row else None for row in data.x[:, 1:].tolist()]


@pytest.mark.parametrize(
    ("train", "test", "expected"),
    [
        (["0.5", "1", "2", "4"], ["1", "unknown", "4", "0.5"], [1, None, 3, 0]),
        (["0.5", "1", "2", "unknown"], ["1", "2", "0.5", "1"], [1, 2, 0, 1]),
        (["0.5", "1", "2", "unknown"], ["1.0", "2.00", "0.5", "1."], [1, 2, 0, 1]),
        (["1", "2", "10", "x"], ["10", "2", "1", "2.5"], [1, 2, 0, None]),
        (["01", "02", "1", "2"], ["1", "XX", "01", "02"], [1, None, 0, 2]),
        (["01", "02", "XX"], ["02", "01", "01"], [1, 0, 0]),
        (["01", "02"], ["1", "2"], [None, None]),
        (["true", "false"], ["false", "true", "?"], [0, 1, None]),
        (["-1", "0", "x"], ["-1.0", "0.0", "-01"], [0, 1, None]),
        (["9007199254740993", "9007199254740992"], ["9007199254740993", "0.5"], [1, None]),
        (["3E1", "30", "4W2"], ["30", "30"], [0, 0]),  # a code of letters and digits is no number
    ],
)
def test_a_category_is_the_same_in_both_files(folder, train, test, expected):
    write_categories(folder, train, test)
    data = load("table", **SEPARATE)
    assert one_hot(data.test) == expected
    assert sorted(one_hot(data.train)) == list(range(len(train)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["10", "9", "1.5", "-1"], [2, 3, 1, 0]),
        (["+1", "-1", "0"], [2, 0, 1]),
        (["true", "false", "maybe"], [2, 0, 1]),
        (["02", "10", "01"], [2, 1, 0]),  # as 1, 10, 2
    ],
)
def test_features_of_a_category_keep_the_order_of_its_text(folder, values, expected):
    write_categories(folder, values, values)
    assert one_hot(load("table", **SEPARATE).train) == expected


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Columns .* have mixed types")
def test_a_category_is_the_same_in_every_chunk_of_a_long_file(folder):
    """pandas guesses types chunk by chunk."""
    write_categories(folder, ["01", "02"] * 150_000 + ["x"], ["02", "01", "x"])
    data = load("table", **SEPARATE, client="c")
    assert one_hot(data.test) == [1, 0, 2]
    assert set(data.train.columns["c"].tolist()) == {"01", "02", "x"}


def test_test_rows_with_a_category_that_training_lacks_are_logged(folder, caplog):
    write_categories(folder, ["0.5", "1"], ["1", "0.5"])
    load("table", **SEPARATE)
    assert "no training row" not in caplog.text
    write_categories(folder, ["0.5", "1"], ["1", "unknown", "?"])
    load("table", **SEPARATE)
    (record,) = [each for each in caplog.records if "no training row" in each.message]
    assert record.name.startswith("lamina.")
    assert "test.csv: column 'c'" in record.message
    assert "2 rows, such as 'unknown'" in record.message
    assert "\n" not in record.message


def test_a_category_of_typed_parquet_columns(folder):
    pytest.importorskip("pyarrow")
    import pandas

    def save(name, values):
        frame = pandas.DataFrame({"x": 0.0, "c": values, "y": [i % 2 for i in range(len(values))]})
        frame.to_parquet(folder / name)

    options = SEPARATE | {"path": "train.parquet", "test": "test.parquet"}
    save("train.parquet", [0.5, 1.0, 2.0])
    for values, expected in (([2, 1], [2, 1]), (["2", "01", "1.0"], [2, None, 1]), (["0.5", "x"], [0, None])):
        save("test.parquet", values)
        assert one_hot(load("table", **options).test) == expected
    write(folder / "test.csv", x=[0, 1, 2], c=["2", "x", "0.5"], y=[0, 1, 0])
    assert one_hot(load("table", **options | {"test": "test.csv"}).test) == [2, None, 0]
    save("train.parquet", ["01", "1", "2"])
    save("test.parquet", [2, 1])
    data = load("table", **options | {"client": "c"})
    assert (one_hot(data.test), data.train.columns["c"].tolist()) == ([2, 1], ["01", "1", "2"])
    save("train.parquet", [True, False])
    save("test.parquet", [False, True])
    data = load("table", **options | {"label": "c", "categorical": []})
    assert (data.train.y.tolist(), data.train.class_names) == ([1, 0], ("0", "1"))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["01", "1", "2", "10"], ["01", "1", "2", "10"]),
        (["01", "1", "1.5", "2"], ["01", "1", "1.5", "2"]),
        (["2", "10", "-1", "9"], [2, 10, -1, 9]),  # numbers, which sort as such
        (["01", "02", "10", "11"], [1, 2, 10, 11]),  # no two are the same number
        (["1.0", "10.0", "2.0", "3.0"], [1.0, 10.0, 2.0, 3.0]),
        (["1", "1.0", "2", "3"], ["1", "1.0", "2", "3"]),
        (["a", "01", "1", "b"], ["a", "01", "1", "b"]),
    ],
)
def test_clients_with_different_ids_stay_apart(folder, ids, expected):
    write(folder / "train.csv", site=ids, x=range(4), y=[0, 1, 0, 1])
    write(folder / "test.csv", site=ids[:1], x=[0], y=[0])
    sites = load("table", path="train.csv", test="test.csv", label="y", client="site").train.columns["site"].tolist()
    assert sites == expected
    assert [type(site) for site in sites] == [type(site) for site in expected]


def test_classes_with_different_names_stay_apart(folder):
    def classes(train, test, **options):
        write(folder / "train.csv", x=range(len(train)), y=train)
        write(folder / "test.csv", x=range(len(test)), y=test)
        data = load("table", path="train.csv", test="test.csv", label="y", **options)
        return data.train.class_names, data.train.y.tolist(), data.test.y.tolist()

    assert classes(["01", "1", "2"], ["1", "01"]) == (("01", "1", "2"), [0, 1, 2], [1, 0])
    assert classes(["01", "1", "x"], ["1", "01"]) == (("01", "1", "x"), [0, 1, 2], [1, 0])
    assert classes(["true", "false"], ["true"]) == (("0", "1"), [1, 0], [1])
    assert classes(["2", "10", "2"], ["10"]) == (("2", "10"), [0, 1, 0], [1])
    assert classes(["-1", "+1"], ["+1"]) == (("-1", "1"), [0, 1], [1])
    assert classes(["01", "1", "2"], ["1", "01"], task="regression") == (None, [1.0, 1.0, 2.0], [1.0, 1.0])
    assert classes(["01.5", "1.5"], ["1e1"]) == (None, [1.5, 1.5], [10.0])
    with pytest.raises(BadInput, match="the class '01' appears only in the test data"):
        classes(["1", "2"], ["01"])


@pytest.mark.parametrize("extra", ["7", "7,8"])
def test_rows_with_more_fields_than_the_header(folder, extra):
    """pandas takes the first field as the row's name and shifts the others."""
    write(folder / "good.csv", a=[0, 1, 2], b=[5, 6, 7], y=[0, 1, 0])
    lines = (folder / "good.csv").read_text().splitlines()
    (folder / "extra.csv").write_text("\n".join([lines[0], *(f"{line},{extra}" for line in lines[1:])]))
    for options in ({"path": "extra.csv", "test": 0.4}, {"path": "good.csv", "test": "extra.csv"}):
        with pytest.raises(BadInput) as refused:
            load("table", label="y", **options)
        assert one_line(refused).startswith("extra.csv is not a readable CSV file in UTF-8 (Length of header or names")
    (folder / "extra.csv").write_text(f"{lines[0]}\n\n" + "\n".join(lines[1:]))
    assert len(load("table", path="extra.csv", test="good.csv", label="y").train) == 3  # an empty line is no row


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
         "'n/a.': correct it or drop the row, list the column in categorical or dates, or leave the "
         "column out"),
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


def test_large_numbers_of_a_table_stay_positive(tmp_path):
    large = np.array([2**63, 2**64 - 2048] * 4, np.uint64)
    table = pd.DataFrame({"feature": large, "target": large, "site": large})
    table.to_csv(tmp_path / "table.csv", index=False)
    options = {"path": str(tmp_path / "table.csv"), "label": "target", "client": "site"}
    train, _ = load("table", **options, task="regression")
    assert set(train.y.tolist()) == {2.0**63, 2.0**64}
    assert set(train.x.flatten().tolist()) == {2.0**63, 2.0**64}
    assert set(train.columns["site"].tolist()) == set(large.tolist())
    assert load("table", **options).train.class_names == ("9223372036854775808", "18446744073709549568")


def test_a_number_of_400_digits_in_a_table_names_its_row(tmp_path):
    file = tmp_path / "table.csv"
    for huge in (str(10**400), f"-{10**400}"):
        file.write_text("a,b\n1,0\n" + f"{huge},1\n" + "2,0\n3,1\n")
        problem = "(holds no number in row 2|holds text)"  # what pandas makes of it depends on its version
        with pytest.raises(BadInput, match=f"column 'a' {problem}"):
            load("table", path=str(file), label="b", test=0.5)


def test_a_table_without_pandas_names_the_extra(folder, monkeypatch):
    (folder / "rows.csv").write_text(ROWS)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[table\]'"):
        load("table", **TABLE)
