"""Sums over rows, against torch's. Needs Triton: a GPU, or its interpreter on a CPU."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.gpu.sums import sum_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: 0 / 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 300, 70), (1, 1000, 64)])
def test_sums_over_rows(shape):
    values = torch.randn(shape, device=DEVICE).bfloat16()
    torch.testing.assert_close(sum_rows(values), values.float().sum(1), rtol=1e-5, atol=1e-4)
