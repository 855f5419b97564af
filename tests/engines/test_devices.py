"""The device and the precision of a run."""

import pytest
import torch
from torch import nn

import lamina
from lamina.engines.devices import arithmetic, check_model_fits, choose_device, has_bf16_instructions
from small_simulations import PARTS


def test_a_cpu_without_bf16_instructions_computes_in_fp32_and_says_so(caplog, monkeypatch):
    net, data = nn.Linear(8, 3), (torch.randn(48, 8), torch.arange(48) % 3)
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: False)
    run = lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", precision="bf16")
    assert run.precision == "fp32"
    assert "this CPU has no bf16 instructions, so the run uses fp32" in caplog.text


def test_bf16_is_never_dropped_in_silence(monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    net, data = nn.Linear(8, 3), (torch.randn(48, 8), torch.arange(48) % 3)
    settings = {"clients": PARTS, "batch_size": 4, "lr": 0.1, "device": "cpu"}
    runs = {
        (engine, precision): lamina.Simulation(net, data, "fedlada", engine=engine, precision=precision, **settings)
        for engine in ("loop", "captured")
        for precision in ("fp32", "bf16")
    }
    ends = {}
    for kind, run in runs.items():
        run.run(2)
        ends[kind] = run.state.server.x
    for engine in ("loop", "captured"):
        change = (ends[engine, "fp32"] - ends[engine, "bf16"]).abs().max()
        assert ends[engine, "bf16"].dtype == torch.float32
        assert 1e-6 < change < 0.05
    assert torch.allclose(ends["loop", "bf16"], ends["captured", "bf16"], atol=1e-3)
    with pytest.raises(lamina.BadInput, match="did you mean 'bf16'"):
        lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", precision="bf61")


@pytest.mark.parametrize("kind", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
def test_an_x86_cpu_needs_more_than_avx512_for_bf16(kind, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert not has_bf16_instructions()
    monkeypatch.setattr(torch.cpu, kind, lambda: True)
    assert has_bf16_instructions()


def test_a_device_that_torch_cannot_use_is_refused():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    for device in ("meta", "cuda:99", "gpu"):
        with pytest.raises(lamina.BadInput, match=f"device = '{device}': torch cannot use it here"):
            choose_device(device)


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_the_switches_of_the_arithmetic_are_set_back(precision, tf32):
    def switches():
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark

    before = switches()
    with arithmetic(precision, benchmark=False):
        assert switches() == (tf32, tf32, False)
    assert switches() == before
    with pytest.raises(ValueError, match="in the run"), arithmetic(precision, benchmark=True):
        raise ValueError("in the run")
    assert switches() == before


def test_a_model_that_cannot_fit_is_refused_before_it_is_copied():
    with torch.device("meta"):
        huge, lazy = nn.Linear(1 << 20, 1 << 25), nn.LazyLinear(3)
    with pytest.raises(lamina.BadInput, match="training a model of 35,184,405,643,264 parameters needs"):
        check_model_fits(huge, torch.device("cpu"))
    check_model_fits(lazy, torch.device("cpu"))  # its size is not known yet
