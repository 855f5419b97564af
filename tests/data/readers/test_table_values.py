"""Values of a table: the same one is the same category, class and client, whatever types pandas guesses."""

import pytest

from data_setup import one_line
from lamina.base.errors import BadInput
from lamina.data import load

SEPARATE = {"path": "train.csv", "test": "test.csv", "label": "y", "categorical": ["c"]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        (["01", "02", "1", "2"], ["1", "XX", "01", "02"], [2, None, 0, 1]),
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
    assert "2 test rows, such as 'unknown'" in record.message
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
