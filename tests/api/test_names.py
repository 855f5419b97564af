"""The names that `import lamina` offers, and what importing them does not load."""

import subprocess
import sys

import pytest

import lamina
from lamina.api import names, results


def test_every_name_is_there_once_and_is_the_one_of_the_package():
    assert len(set(names.__all__)) == len(names.__all__)
    for name in names.__all__:
        assert getattr(lamina, name) is getattr(names, name)


def test_compare_and_tune_are_those_of_the_results():
    assert names.compare is results.compare
    assert names.tune is results.tune


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'lamina\.api\.names' has no attribute 'comparisons'"):
        _ = names.comparisons


def test_a_name_of_a_part_is_found_there():
    with pytest.raises(AttributeError, match=r"no attribute 'Dirichlet'; it is lamina\.data\.Dirichlet"):
        _ = lamina.Dirichlet
    assert not hasattr(lamina, "FedLAMB")


@pytest.mark.long
def test_matplotlib_is_imported_only_with_the_results():
    code = """if True:
        import sys
        from lamina.api import names
        assert not {"matplotlib", "lamina.api.results"} & sys.modules.keys()
        names.compare
        assert {"matplotlib", "lamina.api.results"} <= sys.modules.keys()
    """
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
