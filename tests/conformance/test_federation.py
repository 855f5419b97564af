"""`lamina.conform`: implementations that are right are the same, and each mistake is named where it first shows."""

from functools import partial

import pytest
import torch

import lamina

REGRESSION = torch.arange(120.0).reshape(40, 3).cos(), torch.arange(40.0).sin().reshape(40, 1)


def sgd(y, grad, lr):
    return y - lr * grad


def adam_server(x, delta, state, round, server_lr, tau, v_init, *, sign=1, keep=True, shift=0, beta2=0.99):
    """FedAdam of ours for the defaults; the keyword arguments are mistakes."""
    state = state if keep else {}
    m = state["m"] = 0.9 * state.get("m", 0 * x) + 0.1 * sign * delta
    v = state["v"] = beta2 * state.get("v", 0 * x + v_init) + (1 - beta2) * delta**2
    factor = 1 if not shift else 1 / (1 - 0.9 ** (round + shift))
    return x + factor * server_lr * m / (v.sqrt() + tau)


def test_a_right_server_is_the_same_in_the_model_and_in_its_moments():
    result = lamina.conform("fedadam", adam_server)
    assert result.same
    assert result.verdict == "the same to 1e-12 over 50 steps"
    assert result.quantities == ("x", "m", "v")
    assert (result.others, result.largest < 1e-13) == ((), True)


@pytest.mark.parametrize(
    ("mistake", "place", "ratio"),
    [
        ({"sign": -1}, "round 1", "-1"),
        ({"keep": False}, "round 2", None),
        ({"shift": 1}, "round 1", f"{1 / (1 - 0.9**2):.6g}"),
        ({"v_init": 0.0}, "round 1", None),
        ({"tau": 0.0}, "round 1", None),
        ({"server_lr": 0.1}, "round 1", "10"),
        ({"beta2": 0.999}, "round 1", None),
    ],
)
def test_a_mistake_of_a_server_is_named_where_it_first_shows(mistake, place, ratio):
    result = lamina.conform("fedadam", adam_server, options=mistake)
    assert (result.difference.quantity, result.difference.place) == ("x", place)
    notes = [note for note in result.notes if "times ours" in note]
    assert notes == ([] if ratio is None else [f"their step there is {ratio} times ours, in every coordinate"])


def test_the_size_is_that_of_the_largest_entry():
    result = lamina.conform("fedavg", lambda x, delta: x + delta + 0.25 * (torch.arange(len(x)) == 76), steps=3)
    assert result.difference.entry == "fc.weight[0]"  # after 72 weights and 4 biases of the convolution
    assert result.difference.size == pytest.approx(0.25)
    assert result.difference.theirs - result.difference.ours == pytest.approx(0.25)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_nan_is_a_difference(wrong):
    result = lamina.conform("fedavg", lambda y, grad, k: y - 0.1 * grad + (wrong if k == 3 else 0))
    assert result.difference.place == "round 1, client 1, step 3"
    assert "y is not finite (conv.weight[0]: ours " in result.verdict
    assert result.notes == ()


def test_a_state_that_differs_while_the_model_does_not_is_reported():
    def step(y, grad, lr, state):
        state["m"] = 2 * grad
        return y - lr * grad

    result = lamina.conform("fedadam", lambda x, delta, state: adam_server(x, delta, state, 1, 0.01, 1e-3, 1e-6))
    assert result.same
    result = lamina.conform(lamina.MimeLamb(), sgd, steps=1)
    assert not result.same
    result = lamina.conform(lamina.FedNova(), step, steps=3)  # it has no `m`
    assert (result.same, result.quantities) == (True, ("y",))

    def with_b(y, grad, lr, state):
        state["b"] = 2 * grad
        return y - lr * grad

    result = lamina.conform(lamina.FedNova(), with_b, steps=3)
    assert result.same
    assert [(each.quantity, each.place) for each in result.others] == [("b", "round 1, client 1, step 1")]
    assert "b by" in str(result)


def test_a_control_variate_with_the_wrong_sign_shows_in_the_second_round():
    """In round 1 all control variates are 0; with one client, c = c_i would hide it for ever."""

    def step(y, grad, lr, c, kept, sign=1.0):
        return y - lr * (grad + sign * (c - kept.c))

    assert lamina.conform("scaffold", step).same
    assert lamina.conform("scaffold", step, options={"sign": -1.0}).difference.place == "round 2, client 1, step 1"


def test_a_running_maximum_is_told_from_none():
    def step(y, grad, lr, x, v, g_a, k, state, decay, alpha, maximum=True):
        if k == 1:
            state.update(m=0 * y, v=v, v_hat=v)
        g = grad + decay * y
        state["m"], state["v"] = 0.9 * state["m"] + 0.1 * g, 0.99 * state["v"] + 0.01 * g * g
        state["v_hat"] = torch.maximum(state["v_hat"], state["v"]) if maximum else state["v"]
        return y - lr * (alpha * state["m"] / state["v_hat"].sqrt() + (1 - alpha) * g_a)

    assert lamina.conform("fedlada", step).quantities == ("y", "m", "v", "v_hat")
    assert lamina.conform("fedlada", step).same
    result = lamina.conform("fedlada", step, options={"maximum": False})
    assert not result.same
    assert result.others[0].quantity == "v_hat"


def test_a_second_gradient_is_that_of_the_method():
    assert lamina.conform("fedsam", lambda y, second_grad, grad, lr: y - lr * second_grad).same
    assert lamina.conform("fedsam", lambda y, second_grad, lr: y - lr * second_grad).same


def test_the_loss_of_a_batch_is_given_where_the_method_asks_for_it():
    seen = []

    def step(y, grad, lr, loss):
        seen.append(loss)
        return y - lr * grad

    lamina.conform("fedsps", step, steps=1)
    assert seen[0].shape == (1,)
    with pytest.raises(lamina.BadInput, match="takes 'loss'"):
        lamina.conform("fedavg", step, steps=1)


def test_a_model_that_the_method_cannot_train_is_refused():
    with pytest.raises(lamina.BadInput, match="matri"):
        lamina.conform(
            lamina.FedMuon(muon_on="hidden"), train, model=torch.nn.Linear(3, 1), data=REGRESSION, loss="mse"
        )


def test_numpy_arrays_and_dicts_by_name_are_models():
    assert lamina.conform("fedavg", lambda x, delta: x.numpy() + delta.numpy(), steps=5).same

    def by_name(x, delta):
        parts = (x + delta).split([72, 4, 40, 5])
        return dict(zip(["conv.weight", "conv.bias", "fc.weight", "fc.bias"], parts, strict=True))

    assert lamina.conform("fedavg", by_name, steps=5).same


@pytest.mark.parametrize(
    ("kind", "note", "tolerance"),
    [
        (torch.float32, "theirs computes in float32, whose rounding this may be: a tolerance of 1e-5", 1e-5),
        (torch.float16, "theirs computes in float16, whose rounding this may be: a tolerance of 1e-2", 1e-2),
        (None, "this may be rounding to float32 within theirs: a tolerance of 1e-5", 1e-5),
    ],
)
def test_the_type_is_named_if_rounding_may_be_all(kind, note, tolerance):
    def rounded(x, delta):
        after = x.to(kind or torch.float32) + delta.to(kind or torch.float32)
        return after.double() if kind is None else after

    result = lamina.conform("fedavg", rounded, steps=3)
    assert [note in each for each in result.notes] == [False, True]
    assert lamina.conform("fedavg", rounded, steps=3, tolerance=tolerance).same


def test_a_weight_decay_and_a_model_that_does_not_move_are_named():
    decayed = lamina.conform("fedavg", lambda y, grad, lr: y - lr * (grad + 0.01 * y))
    assert decayed.notes[-1].startswith("the difference is -0.001 times the model before the step, in every coordinate")
    assert lamina.conform("fedavg", lambda y, grad: y).notes[-1] == "theirs leaves the model as it is"


def test_random_numbers_are_named_and_the_same_in_every_comparison():
    def noisy(x, delta):
        return x + delta + 0.1 * torch.randn_like(x)

    state = torch.get_rng_state()
    result = lamina.conform("fedavg", noisy)
    assert result.notes[-1] == "theirs draws random numbers, which ours does not"
    assert lamina.conform("fedavg", noisy) == result
    assert torch.equal(torch.get_rng_state(), state)


def test_the_weights_and_the_aggregation_are_ours_or_theirs():
    by_weights = partial(lamina.conform, weighting="examples", steps=5)
    assert by_weights("fedavg", lambda x, deltas, weights: x + weights @ deltas).same
    assert not by_weights("fedavg", lambda x, deltas: x + deltas.mean(0)).same
    median = partial(lamina.conform, aggregation="median", clients=5, steps=5)
    assert median("fedavg", lambda x, deltas: x + deltas.median(0).values).same
    assert median("fedavg", lambda x, delta: x + delta).same


def test_a_method_that_sends_another_form_of_the_displacement_has_both():
    assert lamina.conform("fednova", lambda x, d, a: x + a * d, steps=4).same
    # with equal numbers of steps it is FedAvg
    assert lamina.conform("fednova", lambda x, delta: x + delta, steps=4).same


def train(model, batches, lr, loss, decay=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def test_a_whole_client_trains_the_same_model_on_the_same_batches():
    assert lamina.conform("fedavg", train, steps=12, local_steps=4).same
    result = lamina.conform("fedavg", train, options={"decay": 0.1})
    assert result.difference.place == "round 1, client 1"
    assert result.difference.entry.split("[")[0] in ("0.weight", "0.bias", "2.weight", "2.bias")


def test_a_whole_client_may_return_its_model_and_further_uploads():
    def client(model, batches, lr, loss):
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        train(model, batches, lr, loss)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        return {"y": model, "delta": after - before}

    assert lamina.conform("fedavg", client, steps=4, local_steps=2).quantities == ("y", "delta")


def test_what_a_function_stores_or_returns_besides_is_left_out():
    def step(y, grad, lr, state):
        state.update(count=torch.tensor(3), log={"a": 1})
        return {"y": y - lr * grad, "log": {"b": 2}}

    assert lamina.conform("fedavg", step, steps=2).quantities == ("y",)


def test_a_model_and_data_of_the_user():
    model = torch.nn.Linear(3, 1)
    before = model.weight.clone()
    assert lamina.conform("fedavg", train, model=model, data=REGRESSION, loss="mse", steps=6).same
    assert torch.equal(model.weight, before)


def test_a_frozen_layer_stays_in_evaluation_mode_on_both_sides():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    model[0].eval()
    assert lamina.conform("fedavg", train, model=model, data=REGRESSION, loss="mse", steps=6).same


NET = torch.nn.Linear(3, 1)
DROPOUT = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (NET, None, "model is given without data"),
        (None, REGRESSION, "data is given without model"),
        (3, REGRESSION, "model is 3: give an nn.Module"),
        (torch.nn.Linear(5, 1), REGRESSION, r"the model cannot take the train data, samples of shape \(3,\)"),
        (torch.nn.Flatten(), REGRESSION, "the model has no trainable parameter"),
        (NET, REGRESSION[0], "cannot read data of type Tensor: give a pair"),
        (NET, (REGRESSION[0], REGRESSION[1][:7]), "must hold one row per sample"),
        (NET, (REGRESSION[0], torch.full((40, 1), float("nan"))), "sample 0 of y holds nan"),
        (NET, (REGRESSION[0][:2], REGRESSION[1][:2]), "2 samples are too few for 3 clients"),
        (DROPOUT, REGRESSION, "the model has dropout or draws random numbers"),
    ],
)
def test_a_bad_model_and_bad_data_are_refused_in_one_line(model, data, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        lamina.conform("fedavg", train, model=model, data=data, loss="mse")
    assert "\n" not in str(refused.value)


def test_the_generators_are_seeded_for_a_client_and_left_alone():
    draws = []

    def client(model, batches, lr, loss):
        draws.append(float(torch.rand(1)))
        train(model, batches, lr, loss)

    torch.manual_seed(5)
    expected = float(torch.rand(1))
    torch.manual_seed(5)
    lamina.conform("fedavg", client, steps=2, local_steps=1, clients=1)
    assert float(torch.rand(1)) == expected
    lamina.conform("fedavg", client, steps=2, local_steps=1, clients=1)
    assert draws[:2] == draws[2:]


def test_the_seed_changes_the_gradients():
    sizes = {lamina.conform("fedavg", lambda x, delta: x, steps=1, seed=seed).difference.size for seed in (0, 0, 1)}
    assert len(sizes) == 2


SGD_STEPS = {
    "fedadagrad", "fedadam", "fedams_server", "fedavg", "fedavgm", "fedexp", "fednova", "fedyogi",
}  # fmt: skip
OTHER_SERVERS = {
    "diloco", "fedadagrad", "fedadam", "fedadam_star", "fedams_server", "fedavgm", "feddyn", "fedyogi",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(lamina.algorithms.BUILT_IN))
def test_every_algorithm_can_be_compared_in_all_halves(name):
    """With SGD and with averaging, which are the halves of some of them."""

    def is_same(theirs):
        return lamina.conform(name, theirs, steps=4, local_steps=2).same

    assert is_same(sgd) == (name in SGD_STEPS)
    assert is_same(train) == (name in SGD_STEPS | {"fedsps"})  # its step sizes reach their bound here, which is lr
    assert is_same(lambda x, delta: x + delta) == (name not in OTHER_SERVERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"half": "upper"}, "half = 'upper' is none of local, server, client"),
        ({"weighting": "size"}, "weighting = 'size' is none of clients, examples"),
        ({"steps": 0}, "steps = 0 is not a whole number >= 1"),
        ({"tolerance": 0.0}, "tolerance = 0.0 is not a number > 0"),
        ({"lr": -1}, "lr = -1 is not a number > 0"),
        ({"model": torch.nn.Linear(1, 1)}, "model is for a whole client, but sgd is a local half"),
        ({"loss": "mse"}, "loss is for a whole client, but sgd is a local half"),
        ({"options": "tau=3"}, "options = 'tau=3' is not a dict of keyword arguments"),
        ({"aggregation": "operator:itemgetter"}, r"cannot create the aggregation operator:itemgetter\(\): TypeError"),
        ({"seed": -1}, "seed = -1 is not a whole number >= 0"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(lamina.BadInput, match=message):
        lamina.conform("fedavg", sgd, **arguments)
