"""Tables become model inputs: missing values, dates and categories, fitted once and applied to later tables."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import lamina
from lamina.base.errors import BadInput
from lamina.data import TablePreprocessing, as_dataset

TABLE = pd.DataFrame(
    {
        "age": [20.0, np.nan, 50.0, 50.0],
        "ward": ["b", "a", None, "b"],
        "day": ["2026-01-03", "2026-01-01", None, "2026-01-02T12:00:00"],
        "y": [0, 1, 0, 1],
    }
)
OPTIONS = {"categorical": ["ward"], "dates": ["day"]}


def fit(**options):
    return TablePreprocessing.fit(TABLE, ["age"], **(OPTIONS | options))


@pytest.mark.parametrize(("missing", "age", "day"), [("mean", 40.0, (2 + 0 + 1.5) / 3), ("most_frequent", 50.0, 0.0)])
def test_missing_values_are_filled_and_marked(missing, age, day):
    fitted = fit(missing=missing)
    assert fitted.features == ["age", "age is missing", "day", "day is missing", "ward=a", "ward=b", "ward is missing"]
    expected = [[20, 0, 2, 0, 0, 1, 0], [age, 1, 0, 0, 1, 0, 0], [50, 0, day, 1, 0, 1, 1], [50, 0, 1.5, 0, 0, 1, 0]]
    assert fitted.transform(TABLE).numpy() == pytest.approx(np.array(expected))


def test_only_training_rows_count():
    rows = np.array([True, False, True, False])
    fitted = fit(missing="mean", standardise=True, rows=rows)
    age, _, marked = (column for column in fitted.columns)
    assert (age.shift, age.scale, age.has_indicator) == (35, 15, False)
    assert marked.values == ("b",)


def test_standardised_training_data_have_mean_0_and_deviation_1():
    x = fit(missing="mean", standardise=True).transform(TABLE)
    for feature in (0, 2):
        assert float(x[:, feature].mean()) == pytest.approx(0, abs=1e-6)
        assert float(x[:, feature].std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_new_tables_are_prepared_as_the_training_table_was(tmp_path, caplog):
    fitted = TablePreprocessing.from_json(fit(missing="mean", rows=np.array([True, False, False, True])).to_json())
    new = pd.DataFrame({"day": ["2026-01-05"], "ward": ["x"], "unused": 3, "age": [None]}).convert_dtypes()
    assert fitted.transform(new).tolist() == [[35, 2.5, 0]]
    assert "column 'age' has no value in 1 row, and had all in training: filled with 35.0" in caplog.text
    assert (
        "column 'ward' has a value that no training row has in 1 row, such as 'x': all its features are 0"
        in caplog.text
    )
    (tmp_path / "new.csv").write_text("ward,age,day\nb,7,2026-01-02T12:00:00\n")
    assert fitted.transform(tmp_path / "new.csv").tolist() == [[7, 0, 1]]
    assert fitted.transform(str(tmp_path / "new.csv")).dtype == torch.float32


@pytest.mark.parametrize("unit", ["s", "ns"])
def test_dates_of_pandas_need_not_be_listed(unit):
    days = pd.to_datetime(pd.Series(["2026-03-01", "2026-02-27"])).dt.as_unit(unit)
    for column in (days, days.dt.tz_localize("UTC")):
        table = pd.DataFrame({"day": column, "y": [0.5, 1.5]})
        assert as_dataset(table, y="y").x.tolist() == [[2], [0]]


def test_dates_in_another_format():
    table = pd.DataFrame({"day": ["02.01.2026", "01.02.2026"]})
    fitted = TablePreprocessing.fit(table, dates=["day"], date_format="%d.%m.%Y")
    assert fitted.transform(table).tolist() == [[0], [30]]
    with pytest.raises(BadInput, match=r"holds no date of the form %d\.%m\.%Y in row 1 .*, '2026-01-02': correct it"):
        fitted.transform(pd.DataFrame({"day": ["2026-01-02"]}))


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({}, {}, "column 'age' has a missing value in row 2 .*: fill it .missing = 'mean'., drop the row"),
        ({"day": "soon"}, {"missing": "mean"}, "column 'day' holds no date as 2026-01-31 .* row 1 .*, and 3 other"),
        ({"age": None}, {"missing": "mean"}, "column 'age' holds no value in any training row"),
        ({"age": "?"}, {"missing": "mean"}, "column 'age' holds no number in row 1 .*, '.'"),
        ({"age": np.inf}, {"missing": "mean"}, "column 'age' has an infinite value in row 1"),
        ({}, {"missing": "median"}, "unknown way to fill missing values 'median'; did you mean 'mean'"),
        ({}, {"dates": ["ward"]}, "column 'ward' is listed twice"),
        ({}, {"dates": ["days"], "missing": "mean"}, "no column 'days'; did you mean 'day'"),
    ],
)  # fmt: skip
def test_what_cannot_become_a_number_is_refused(change, options, expected):
    with pytest.raises(BadInput, match=expected):
        TablePreprocessing.fit(TABLE.assign(**change), ["age"], **(OPTIONS | options))


def test_a_new_table_needs_the_columns_of_the_training_table():
    with pytest.raises(BadInput, match=r"patients: no column 'age' \(columns: ward, day\)"):
        fit(missing="mean").transform(TABLE[["ward", "day"]], "patients")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "date_format": null, "columns": [{}]}']
)
def test_a_damaged_record_is_refused(text):
    with pytest.raises(BadInput, match="no stored preprocessing"):
        TablePreprocessing.from_json(text)


def test_a_data_set_of_a_table_with_options():
    train = as_dataset(TABLE, y="y", preprocessing=OPTIONS | {"missing": "mean"})
    assert torch.equal(train.x, fit(missing="mean").transform(TABLE))
    assert train.column_names["x"] == tuple(train.preprocessing.features)
    part = as_dataset(TABLE[:1], y="y", preprocessing=train.preprocessing)
    assert part.x.tolist() == train.x[:1].tolist()
    assert train.subset([1]).preprocessing is train.preprocessing
    with pytest.raises(BadInput, match="preprocessing has no option 'category'; did you mean 'categorical'"):
        as_dataset(TABLE, y="y", preprocessing={"category": ["ward"]})


def test_a_test_table_that_was_prepared_apart_is_refused():
    options = OPTIONS | {"missing": "mean", "standardise": True}
    train = as_dataset(TABLE, y="y", preprocessing=options)
    model = torch.nn.Linear(7, 2)
    with pytest.raises(BadInput, match=r"prepared apart .* preprocessing=train\.preprocessing"):
        lamina.Simulation(
            model, train, clients=2, test=as_dataset(TABLE.assign(age=[1, None, 2, 3]), y="y", preprocessing=options)
        )
    test = as_dataset(TABLE, y="y", preprocessing=train.preprocessing)
    lamina.Simulation(model, train, "fedavg", clients=2, test=test)


def test_a_run_keeps_its_preprocessing(tmp_path):
    train = as_dataset(TABLE, y="y", preprocessing=OPTIONS | {"missing": "mean"})
    run = lamina.Simulation(torch.nn.Linear(7, 2), train, "fedavg", clients=2, test=train, out=tmp_path / "r")
    run.run(1)
    text = (tmp_path / "r" / "preprocessing.json").read_text()
    assert json.loads(text)["columns"][0]["name"] == "age"
    assert TablePreprocessing.from_json(text) == train.preprocessing
    other = (torch.zeros(4, 7), torch.tensor([0, 1, 0, 1]))
    lamina.Simulation(
        torch.nn.Linear(7, 2), other, "fedavg", clients=2, test=other, out=tmp_path / "r", overwrite=True
    ).run(1)
    assert not (tmp_path / "r" / "preprocessing.json").exists()
