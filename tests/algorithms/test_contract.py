"""The contract, checked for every algorithm in the registry and for every choice of every option."""

import dataclasses
import inspect
import sys
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from lamina import BadInput, Layers, algorithms
from lamina.algorithms.contract import ClientInfo, Number, ServerInfo, trial_step
from lamina.algorithms.declaration import options, registry
from lamina.algorithms.rehearsal import rehearse
from lamina.rounds.ledger import payload_bytes, wire_cost

LAYERS = Layers({"a.weight": (3, 2), "a.bias": (3,), "b.weight": (2, 2), "c.weight": (2, 2)})
P = LAYERS.size


def variants():
    """Every algorithm with its defaults, every preset, and every other value of every choice and switch."""
    for name, cls in registry().items():
        yield f"{name}", cls()
        for preset, values in cls.card.presets.items():
            yield f"{name}-{preset}", cls(**values)
        hints = get_type_hints(cls)
        for option, field in options(cls).items():
            if get_origin(hints[option]) is Literal:
                values = [v for v in get_args(hints[option]) if v != field.default]
            else:
                values = [not field.default] if hints[option] is bool else []
            for value in values:
                more = {"sync_every": 2} if option == "lazy" else {}
                if option == "decay_form":
                    more = {"decay": 0.1}
                yield f"{name}-{option}={value}", cls(**{option: value, **more})


VARIANTS = dict(variants())
every_variant = pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS.keys())


def play(algorithm, x, gradients, rounds=3, lr=0.01, steps=2.0):
    """Run rounds of two steps for one client; return the server's last state and every record on the way."""
    server, client, records = algorithm.init(x, LAYERS), algorithm.client_init(x, LAYERS), []
    for r in range(1, rounds + 1):
        needs = algorithm.needs(r)
        full = gradients(r, 0) if needs.full_gradient or needs.control_variate else None
        server_info = ServerInfo(r, lr, LAYERS, participation=0.5, mean_steps=steps, mean_gradient=full)
        info = ClientInfo(r, lr, LAYERS, steps=steps, full_gradient=full)
        down = algorithm.broadcast(server, server_info)
        local = algorithm.begin(down, client, info)
        records += [server, client, down, local]
        for k in (1, 2):
            local = trial_step(algorithm, local, down, gradients(r, k), info)
            records.append(local)
        up, client = algorithm.finish(local, down, client, info)
        server = algorithm.update(server, up, server_info)
        records += [up, client, server]
    return server, records


def gradients_for(shape, seed=0, dtype=torch.float64):
    def gradient(r, k):
        generator = torch.Generator().manual_seed(seed + 100 * r + k)
        return torch.randn(shape, generator=generator, dtype=dtype)

    return gradient


@every_variant
def test_records_are_named_tuples_of_vectors_and_numbers_per_layer_or_client(algorithm):
    x = gradients_for((P,))(0, 0)
    server, records = play(algorithm, x, gradients_for((P,)))
    for record in records:
        assert hasattr(record, "_fields")
        for name, value in zip(record._fields, record, strict=True):
            sizes = (P, len(LAYERS.group_sizes(algorithm.grouping)), 1)
            assert value is None or (value.dim() == 1 and len(value) in sizes), (type(record), name)
    assert server.x.shape == (P,)
    assert torch.isfinite(server.x).all()
    assert not torch.equal(server.x, x)  # it moved


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(algorithm, dtype):
    _, records = play(algorithm, torch.ones(P, dtype=dtype), gradients_for((P,), dtype=dtype))
    assert {value.dtype for record in records for value in record if value is not None} == {dtype}


@every_variant
def test_functions_are_pure(algorithm):
    """Nothing that was handed out is ever changed, and the same input gives the same output."""
    x = gradients_for((P,))(0, 0)
    keep = x.clone()
    first, records = play(algorithm, x, gradients_for((P,)))
    copies = [[None if v is None else v.clone() for v in record] for record in records]
    again, _ = play(algorithm, x, gradients_for((P,)))
    assert torch.equal(x, keep)
    assert torch.equal(first.x, again.x)
    for record, copy in zip(records, copies, strict=True):
        assert all(a is None or torch.equal(a, b) for a, b in zip(record, copy, strict=True))


def assert_row(together, alone, row, rows=3):
    """Assert that one row of stacked records is what one client or experiment alone has."""
    for stacked, single in zip(together, alone, strict=True):
        for name, a, b in zip(single._fields, stacked, single, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                a = a.expand(rows, a.shape[-1])  # a state that no option or gradient has reached yet
                least = 1e-2 if name == "h" else 0.0  # Scaffnew's h is 0 for a client alone
                rounding = 1e-12 * max(float(b.abs().max()), least)
                assert torch.allclose(a[row], b, rtol=1e-12, atol=rounding), f"{type(single).__name__}.{name}"


@every_variant
@pytest.mark.parametrize("per_row", [False, True])
def test_leading_axes_do_not_mix(algorithm, per_row):
    """A [3, p] cohort is three clients of [p], whatever the neighbours hold, also if the rate and K_i differ."""
    x = gradients_for((3, P))(0, 0)
    rates, steps = [0.1, 0.03, 0.2] if per_row else [0.1] * 3, [3.0, 4.0, 5.0] if per_row else [2.0] * 3
    column = (
        (lambda values: torch.tensor(values, dtype=torch.float64)[:, None]) if per_row else (lambda values: values[0])
    )
    _, together = play(algorithm, x, gradients_for((3, P)), lr=column(rates), steps=column(steps))
    for i in range(3):
        gradients = lambda r, k, i=i: gradients_for((3, P))(r, k)[i]  # noqa: E731
        _, alone = play(algorithm, x[i], gradients, lr=rates[i], steps=steps[i])
        assert_row(together, alone, i)


GRID = {  # three values of every numeric option
    "alpha": (0.1, 0.5, 1.0),
    "beta": (0.95, 0.5, 0.0),
    "beta1": (0.9, 0.5, 0.0),
    "beta2": (0.99, 0.7, 0.999),
    "v_init": (1e-6, 1e-4, 1e-2),
    "m_init": (0.0, 0.01, -0.1),
    "eps": (0.0, 1e-3, 1e-8),
    "tau": (1e-3, 0.0, 0.1),
    "root_eps": (0.0, 1e-4, 1e-8),
    "server_lr": (1.0, 0.5, 0.1),
    "decay": (0.0, 0.1, 0.3),
    "mu": (0.0, 0.1, 1.0),
    "rho": (0.1, 0.0, 0.5),
    "v_hat_init": (1e-3, 1e-6, 0.1),
    "c": (0.5, 0.1, 2.0),
    "lower_bound": (0.0, -1.0, 0.01),
    "gamma": (2.0, 0.1, 10.0),
    "delta": (0.1, 0.0, 1.0),
    "theta_init": (1.0, 0.0, 2.0),
    "scale": (0.0, 0.5, 1.5),
    "momentum": (0.9, 0.5, 0.2),
    "eps_decay": (1.0, 0.9, 0.5),
    "p": (0.1, 0.5, 1.0),
    "muon_scale": (0.5, 1.0, 10.0),
    "clip_direction": (0.5, 2.0, float("inf")),
    "phi_min": (0.0, 0.01, 1.0),
    "phi_max": (2.0, 1.5, float("inf")),
}
SHARES = (0.1, 0.5, 0.9)
BELOW_ONE = {"fedmuon": {"alpha": SHARES}, "fedadamw": {"alpha": SHARES}, "fedavgm": {"mu": SHARES}}


@every_variant
def test_numeric_options_may_be_one_per_leading_index(algorithm):
    """Options as [3, 1] tensors, all of them or every second one, are three experiments side by side."""
    hints = get_type_hints(type(algorithm))
    numeric = [name for name in options(type(algorithm)) if hints[name] == Number]
    values = GRID | BELOW_ONE.get(algorithm.card.name, {})
    x = gradients_for((P,))(0, 0)
    for chosen in (numeric, numeric[::2], numeric[1::2]):
        if algorithm.card.name == "fednova" and chosen is numeric:
            chosen = [name for name in numeric if name != "mu"]  # with momentum it is refused
        grid = {name: torch.tensor(values[name], dtype=torch.float64)[:, None] for name in chosen}
        _, together = play(dataclasses.replace(algorithm, **grid), x.expand(3, P), gradients_for((P,)), rounds=2)
        for i in range(3):
            single = dataclasses.replace(algorithm, **{name: values[name][i] for name in chosen})
            assert_row(together, play(single, x, gradients_for((P,)), rounds=2)[1], i)


@every_variant
def test_down_and_up_carry_what_the_ledger_counts(algorithm):
    cost = wire_cost(algorithm)
    assert cost.down >= 1
    assert cost.up >= 1
    x = torch.ones(P)
    info = ServerInfo(1, 0.1, LAYERS, mean_gradient=x if algorithm.needs(1).control_variate else None)
    down = algorithm.broadcast(algorithm.init(x, LAYERS), info)
    assert payload_bytes(down)["x"] == 4 * P
    assert set(algorithm.down_versions(1)) <= set(down._fields)


@pytest.mark.parametrize("name", registry())
def test_every_algorithm_minimises_a_quadratic_with_its_default_rate(name):
    """0.5 ||y - 1||^2 from y = 2: every method brings the loss down in 30 rounds of 2 steps."""
    algorithm = algorithms.create(name)
    server, client = algorithm.init(torch.full((P,), 2.0), LAYERS), algorithm.client_init(torch.zeros(P), LAYERS)
    for r in range(1, 31):
        server_info = ServerInfo(r, algorithm.card.lr, LAYERS, mean_steps=2.0)
        info = ClientInfo(r, algorithm.card.lr, LAYERS, steps=2.0, full_gradient=server.x - 1)
        down = algorithm.broadcast(server, server_info)
        local = algorithm.begin(down, client, info)
        for _ in range(2):
            local = trial_step(algorithm, local, down, local.y - 1, info)
        up, client = algorithm.finish(local, down, client, info)
        server = algorithm.update(server, up, server_info)
    assert float(((server.x - 1) ** 2).sum()) < P


@pytest.mark.parametrize("name", registry())
def test_cards_and_files_are_complete(name):
    cls = registry()[name]
    assert cls.card.name == name
    assert cls.card.reference
    assert cls.__doc__
    assert all(field.metadata["doc"] for field in options(cls).values())
    source = inspect.getsource(inspect.getmodule(cls))
    assert source.count("@algorithm(") == 1
    assert len(source.splitlines()) <= 180  # three screens
    assert cls.card.link.startswith("https://arxiv.org/abs/") or name == "fedlada_lamb"  # our own


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: algorithms.create("fedlam"), "did you mean 'fedlamb'"),
        (lambda: algorithms.create("Fed-LAMB"), "did you mean 'fedlamb'"),
        (lambda: algorithms.create("fedlamb", beta_1=0.9), "did you mean 'beta1'"),
        (lambda: algorithms.create("fedlamb", preset="author"), "did you mean 'authors'"),
        (lambda: algorithms.create("localadam", preset="x"), "localadam has no presets"),
        (lambda: algorithms.create("fedlamb", phi_min=2.0, phi_max=1.0), "phi_min = 2 is above phi_max = 1"),
        (lambda: algorithms.create("fedavg", decay_form="l2"), "fedavg has no option 'decay_form'"),
        (lambda: algorithms.create("no.such.module:Thing"), "cannot load the algorithm"),
        (lambda: algorithms.create("collections:OrderedDict"), "is not an algorithm class"),
    ],
)  # fmt: skip
def test_bad_names_and_options_are_refused_in_one_line(call, text):
    with pytest.raises(BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


@every_variant
def test_every_variant_passes_the_rehearsal(algorithm):
    rehearse(algorithm)


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("1 / 0", "cannot load the algorithm 'broken_algorithm:Own': ZeroDivisionError: division by zero"),
        (
            "from lamina import *\n@algorithm('half', title='', reference='', lr=1.0)\nclass Own(Algorithm): ...",
            "the algorithm 'broken_algorithm:Own' is not complete: it lacks step, update",
        ),
    ],
)
def test_a_module_of_the_user_that_is_broken_is_refused_in_one_line(source, text, tmp_path, monkeypatch):
    (tmp_path / "broken_algorithm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_algorithm", raising=False)
    with pytest.raises(BadInput, match=text):
        algorithms.create("broken_algorithm:Own")


def test_a_users_algorithm_is_found_by_import_path():
    assert algorithms.find("lamina.algorithms.fedlada:FedLada").card.name == "fedlada"
