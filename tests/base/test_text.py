"""Text for people: lists, tables, CSV, and hashes of several texts."""

import csv
import io

import pytest

from lamina.base.text import csv_text, hash_parts, listed, printable, text_table


@pytest.mark.parametrize(
    ("items", "line"), [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_a_list_is_cut_after_a_number_of_items(items, line):
    assert listed(items, most=2) == line


def test_line_breaks_are_kept_only_if_asked_for():
    assert printable("a\n\tb\u202ec") == "a\\n\\tb\\u202ec"
    assert printable("a\n\tb\u202ec", lines=True) == "a\n\\tb\\u202ec"


def test_a_text_table_aligns_its_columns_and_has_one_line_per_row():
    lines = text_table(["name", "kB\nin all"], [["fedavg", "2.2"], ["a\nb", "10"]]).split("\n")
    assert lines == ["name    kB in all", "fedavg        2.2", "a b            10"]


def test_csv_text_quotes_cells_and_defuses_formulas():
    text = csv_text([["a,b", 'c"d'], ["=1+1", -0.5]], line_end="\r\n")
    assert text.endswith("\r\n")
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a,b", 'c"d'], ["'=1+1", "-0.5"]]


def test_a_hash_depends_on_where_texts_end():
    assert hash_parts(["ab", "c"]) == hash_parts(iter(["ab", "c"]))
    assert len({hash_parts(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])}) == 4
