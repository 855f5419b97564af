"""New data from files; tests/cli/test_predict.py reads each kind for a trained model."""

import numpy as np
import pandas
import pytest
import torch

import lamina
from lamina.data.preprocessing import TablePreprocessing
from lamina.data.readers.new import read_inputs, read_labelled


def test_the_array_is_the_one_that_the_run_names(tmp_path):
    like = lamina.Dataset(torch.zeros(1, 2), [0])
    np.savez(tmp_path / "new.npz", pixels=np.ones((3, 2)), x=np.zeros((3, 2)))
    options = {"name": "arrays", "features": "pixels"}
    assert read_inputs(tmp_path / "new.npz", options, like, None).x.tolist() == [[1, 1]] * 3
    assert read_inputs(tmp_path / "new.npz", {"name": "own"}, like, None).x.tolist() == [[0, 0]] * 3
    with pytest.raises(lamina.BadInput, match="no array 'inputs'"):
        read_inputs(tmp_path / "new.npz", {"name": "arrays", "features": "inputs"}, like, None)


def test_a_parquet_file_keeps_its_types(tmp_path):
    pandas.DataFrame({"age": [1.5, 2.5], "ward": ["a", "b"]}).to_parquet(tmp_path / "new.parquet")
    rows = pandas.DataFrame({"age": [1.0, 2.0], "ward": ["a", "b"]})
    fitted = TablePreprocessing.fit(rows, categorical=["ward"])
    new = read_inputs(tmp_path / "new.parquet", {}, lamina.Dataset(torch.zeros(1, 3), [0]), fitted)
    assert new.columns == {"age": [1.5, 2.5], "ward": ["a", "b"]}
    assert fitted.transform(new.x).tolist() == [[1.5, 1, 0], [2.5, 0, 1]]


@pytest.mark.parametrize(("written", "names"), [(["0", "1"], ("0", "1")), (["1.0", "3.0"], ("1", "3"))])
def test_labels_are_numbered_by_the_names_of_the_run(tmp_path, written, names):
    like = lamina.Dataset(torch.zeros(2, 1), [0, 1], class_names=names, labels_are_names=True)
    (tmp_path / "new.csv").write_text(f"age,ill\n1,{written[1]}\n2,{written[0]}\n")
    fitted = TablePreprocessing.fit(pandas.DataFrame({"age": [1.0, 2.0]}))
    data = read_labelled(tmp_path / "new.csv", {"name": "table", "label": "ill"}, like, fitted)
    assert (data.y.tolist(), data.class_names, data.x.tolist()) == ([1, 0], names, [[1.0], [2.0]])


def test_numbers_to_predict_stay_numbers(tmp_path):
    like = lamina.Dataset(torch.zeros(2, 1), torch.zeros(2))
    fitted = TablePreprocessing.fit(pandas.DataFrame({"age": [1.0, 2.0]}))
    table, options = pandas.DataFrame({"age": [1], "cost": [3]}), {"name": "table", "label": "cost"}
    assert read_labelled(table, options, like, fitted).y.tolist() == [3.0]
    with pytest.raises(lamina.BadInput, match="no column 'cost'"):
        read_labelled(table.drop(columns="cost"), options, like, fitted)
    with pytest.raises(lamina.BadInput, match="holds text"):
        read_labelled(table.assign(cost="much"), options, like, fitted)
