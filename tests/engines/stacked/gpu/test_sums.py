"""Sums over rows, against torch's. Needs Triton: a GPU, or its interpreter on a CPU."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.gpu.sums import squared_distances, sum_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: 0 / 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 300, 70), (1, 1000, 64)])
def test_sums_over_rows(shape):
    values = torch.randn(shape, device=DEVICE).bfloat16()
    torch.testing.assert_close(sum_rows(values), values.float().sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("count", "width"), [(3, 5), (2, 4097), (5, 150_001)])
def test_squared_distances(count, width):
    rows, centres = torch.randn(count, width, device=DEVICE), torch.randn(2, width, device=DEVICE)
    which = torch.arange(count, device=DEVICE) % 2
    expected = (rows.double() - centres[which].double()).square().sum(1)
    torch.testing.assert_close(squared_distances(rows, centres, which).double(), expected, rtol=1e-5, atol=0)


def test_a_distance_is_not_finite_if_an_element_is_not():
    rows = torch.zeros(2, 9000, device=DEVICE)
    rows[1, 8999] = torch.nan
    distances = squared_distances(
        rows, torch.zeros(1, 9000, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    )
    assert distances.isfinite().tolist() == [True, False]
