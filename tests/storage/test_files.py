"""JSON and CSV files, and folders that cannot be written to."""

import json

import numpy as np
import pytest

from lamina.base.errors import BadInput
from lamina.storage.files import as_json, check_writable, write_csv, write_json, writing_to


def test_values_that_json_lacks_become_ones_that_it_has(tmp_path):
    value = {1: (np.float32(0.5), np.int64(3)), "path": tmp_path, "far": [float("inf"), None, True]}
    assert as_json(value) == {"1": [0.5, 3], "path": str(tmp_path), "far": ["inf", None, True]}
    write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == as_json(value)


def test_a_csv_file_has_the_columns_in_order_and_gaps_where_a_row_lacks_one(tmp_path):
    write_csv(tmp_path / "a.csv", ["round", "loss"], [{"loss": 0.5, "round": 1, "other": 2}, {"round": 2}])
    assert (tmp_path / "a.csv").read_bytes() == b"round,loss\r\n1,0.5\r\n2,\r\n"


def test_a_writable_folder_is_not_created_by_the_check(tmp_path):
    check_writable(tmp_path / "new" / "run")
    assert not list(tmp_path.iterdir())


def test_a_folder_below_a_file_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot write to the folder '.*run'.*: '.*/file'; choose another with --out"):
        check_writable(tmp_path / "file" / "run")


def test_an_error_of_the_system_becomes_one_line(tmp_path):
    message = r"^cannot write to the folder '.*': No such file or directory$"
    with pytest.raises(BadInput, match=message), writing_to(tmp_path):
        (tmp_path / "missing" / "file").touch()
