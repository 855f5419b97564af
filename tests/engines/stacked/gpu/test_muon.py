"""The Newton-Schulz iteration with factors in float16 on a GPU, against numpy in double precision."""

import numpy as np
import pytest
import torch

import more_transcriptions
from lamina.algorithms import localmuon
from lamina.algorithms.localmuon import newton_schulz
from lamina.engines.devices import arithmetic

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("shape", [(3, 64, 576), (2, 576, 64), (2, 96, 128), (3, 64, 27), (1, 512, 4608)], ids=str)
@pytest.mark.parametrize("values", ["random", "four decades", "eight, then zeros"])
def test_halves_are_as_exact_as_tf32(shape, values, monkeypatch):
    """Values that are zero stay so: if x itself were rounded to float16, they would grow, to an error of 4 %."""
    u = np.random.default_rng(0).standard_normal(shape)
    p, s, q = np.linalg.svd(u, full_matrices=False)
    if values == "four decades":
        s = np.broadcast_to(np.logspace(0, -4, s.shape[-1]), s.shape)
    elif values == "eight, then zeros":
        s = np.broadcast_to(np.arange(s.shape[-1]) < 8, s.shape)
    u = torch.from_numpy(1e-5 * (p * s[:, None]) @ q).float()
    expected = more_transcriptions.newton_schulz(u.double().numpy())
    given = u.cuda()

    def error(precision):
        with arithmetic(precision):
            o = newton_schulz(given)
        assert torch.equal(given.cpu(), u)
        assert o.dtype == torch.float32
        return np.linalg.norm(o.double().cpu().numpy() - expected) / np.linalg.norm(expected)

    assert error("fp32") < 1e-4
    halves = error("tf32")
    assert error("bf16") == halves  # a run in bf16 allows TF32
    monkeypatch.setattr(localmuon, "_multiply_halves", lambda x: False)
    assert 1e-4 < halves < 1.5e-2  # it does round
    assert halves < 2.5 * max(error("tf32"), 1e-3)


def test_a_nan_stays_in_its_matrix():
    u = torch.randn(3, 16, 40, device="cuda")
    u[1, 0, 0], u[2] = torch.nan, 0.0
    with arithmetic("tf32"):
        o = newton_schulz(u)
    assert o[0].isfinite().all()
    assert o[1].isnan().any()
    assert (o[2] == 0).all()
