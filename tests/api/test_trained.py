"""`lamina.load`: a run's folder is enough to predict and to evaluate."""

import functools
import json
import sys

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import lamina


def points(n=60, features=5, seed=0):
    x = torch.randn(n, features, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def trained(folder, model=None, data=None, rounds=2, **settings):
    data = points() if data is None else data
    settings = {"test": data, "clients": 4, "lr": 0.1, "device": "cpu", **settings}
    model = nn.Sequential(nn.Linear(5, 2)) if model is None else model
    simulation = lamina.Simulation(model, data, "fedavg", out=folder, **settings)
    simulation.run(rounds)
    return simulation


class Net(nn.Module):
    """Importable as test_trained:Net, with an argument that no folder stores."""

    def __init__(self, width=8):
        super().__init__()
        self.hidden, self.head = nn.Linear(5, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.hidden(x).relu())


def make_net(classes):
    return Net(classes)


# --- the model --------------------------------------------------------------------------------------------------------


def test_a_loaded_run_gives_the_trained_models_outputs_history_and_metrics(tmp_path):
    simulation = trained(tmp_path / "run")
    run = lamina.load(tmp_path / "run")
    x, y = points(7, seed=1)
    assert torch.equal(run.predict(x).outputs, simulation.model(x))
    assert run.config["train"]["lr"] == 0.1
    assert run.history[-1]["accuracy"] == simulation.history[-1]["accuracy"]
    assert run.evaluate(points()) == {name: simulation.history[-1][name] for name in ("loss", "accuracy")}
    assert run.evaluate((x, y), metrics="f1").keys() == {"loss", "f1"}
    assert not run.model.training


def test_a_registered_model_needs_nothing_but_the_folder(tmp_path):
    simulation = trained(tmp_path / "run", "small_cnn", "digits", test=None, rounds=1)
    (tmp_path / "run").rename(tmp_path / "moved")
    digits = lamina.data.load("digits").test
    assert torch.equal(lamina.load(tmp_path / "moved").predict(digits.x).outputs, simulation.model(digits.x))


def test_best_takes_the_best_round_and_an_unfinished_run_has_only_that(tmp_path):
    simulation = trained(tmp_path / "run", rounds=3, lr=3.0)
    best = max(simulation.history, key=lambda row: row["accuracy"])
    assert lamina.load(tmp_path / "run", best=True).evaluate(points())["accuracy"] == best["accuracy"]
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(lamina.BadInput, match=r"no model.safetensors .*best=True takes the best model so far"):
        lamina.load(tmp_path / "run")


@pytest.mark.parametrize("model", [Net, make_net], ids=["class", "factory"])
def test_own_code_is_imported_by_its_name(tmp_path, model):
    simulation = trained(tmp_path / "run", model)
    x, _ = points(3)
    assert torch.equal(lamina.load(tmp_path / "run").predict(x).outputs, simulation.model(x))


def test_a_module_is_made_again_only_if_its_class_needs_no_arguments(tmp_path):
    simulation = trained(tmp_path / "default", Net())
    x, _ = points(3)
    assert torch.equal(lamina.load(tmp_path / "default").predict(x).outputs, simulation.model(x))
    wide = trained(tmp_path / "wide", Net(3))
    with pytest.raises(lamina.BadInput, match=r"your own '.*test_trained:Net'.*model=…"):
        lamina.load(tmp_path / "wide")
    run = lamina.load(tmp_path / "wide", model=Net(3))
    assert torch.equal(run.predict(x).outputs, wide.model(x))
    with pytest.raises(lamina.BadInput, match="do not fit the model"):
        lamina.load(tmp_path / "wide", model=Net(4))


def test_the_arguments_of_a_partial_are_stored(tmp_path):
    simulation = trained(tmp_path / "run", functools.partial(Net, width=3))
    x, _ = points(3)
    assert torch.equal(lamina.load(tmp_path / "run").predict(x).outputs, simulation.model(x))


def test_code_that_has_changed_is_noticed(tmp_path, caplog):
    trained(tmp_path / "run", make_net)
    file = tmp_path / "run" / "model.json"
    facts = json.loads(file.read_text())
    facts["model"]["attributes"] = "of another version"
    file.write_text(json.dumps(facts))
    lamina.load(tmp_path / "run")
    assert "has other settings than when it was trained" in caplog.text


def test_of_training_and_test_data_the_test_data_are_evaluated(tmp_path):
    simulation = trained(tmp_path / "run", "mlp", "digits", test=None, rounds=1)
    run = lamina.load(tmp_path / "run")
    assert run.evaluate("digits")["accuracy"] == simulation.history[-1]["accuracy"]
    assert run.evaluate(lamina.data.load("digits").train) != run.evaluate(lamina.data.load("digits"))


def test_missing_code_is_named_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "code_of_mine.py").write_text(
        "from torch import nn\nclass Mine(nn.Linear):\n    def __init__(self):\n        super().__init__(5, 2)\n"
        "def loss(outputs, targets):\n    return nn.functional.cross_entropy(outputs, targets, reduction='none')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import code_of_mine

    trained(tmp_path / "run", code_of_mine.Mine, loss=code_of_mine.loss)
    assert lamina.load(tmp_path / "run").evaluate(points())["loss"] > 0
    monkeypatch.undo()
    del sys.modules["code_of_mine"]
    with pytest.raises(lamina.BadInput, match=r"'code_of_mine:Mine'.*No module named") as error:
        lamina.load(tmp_path / "run")
    assert "\n" not in str(error.value)
    run = lamina.load(tmp_path / "run", model=nn.Linear(5, 2))
    predictions = run.predict(points()[0])
    assert predictions.probabilities is None  # whether such outputs are logits only the loss knows
    assert predictions.labels.tolist() == predictions.outputs.argmax(1).tolist()
    with pytest.raises(lamina.BadInput, match="the run's loss is your own 'code_of_mine:loss'"):
        run.evaluate(points())
    assert run.evaluate(points(), loss="cross_entropy")["loss"] > 0


def test_own_metrics_are_named_if_they_are_missing(tmp_path):
    def ones(outputs, targets):
        return outputs.argmax(1).float().mean()

    trained(tmp_path / "run", metrics=[ones])
    run = lamina.load(tmp_path / "run")
    with pytest.raises(lamina.BadInput, match=r"the run's metric 'ones' is your own function.*give metrics="):
        run.evaluate(points())
    assert set(run.evaluate(points(), metrics=[ones, "accuracy"])) == {"loss", "ones", "accuracy"}


def test_metrics_out_of_a_missing_module_say_what_to_give(tmp_path, monkeypatch):
    (tmp_path / "metrics_of_mine.py").write_text("def first(outputs, targets):\n    return outputs[0, 0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    trained(tmp_path / "run", metrics=["metrics_of_mine:first"])
    monkeypatch.undo()
    del sys.modules["metrics_of_mine"]
    run = lamina.load(tmp_path / "run")
    with pytest.raises(lamina.BadInput, match=r"'metrics_of_mine:first': No module named.*give metrics=") as error:
        run.evaluate(points())
    assert "\n" not in str(error.value)
    assert set(run.evaluate(points(), metrics=["accuracy"])) == {"loss", "accuracy"}
    with pytest.raises(lamina.BadInput, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        run.evaluate(points(), metrics=["acuracy"])


def test_a_folder_without_model_json_is_refused(tmp_path):
    trained(tmp_path / "run")
    (tmp_path / "run" / "model.json").unlink()
    with pytest.raises(lamina.BadInput, match=r"has no model\.json"):
        lamina.load(tmp_path / "run")
    with pytest.raises(lamina.BadInput, match="not a run's folder"):
        lamina.load(tmp_path)


def test_a_run_that_an_earlier_version_began_gets_model_json_at_its_end(tmp_path):
    trained(tmp_path / "run", "mlp")
    (tmp_path / "run" / "model.json").unlink()
    simulation = trained(tmp_path / "run", "mlp", rounds=3)
    x, _ = points(3)
    assert torch.equal(lamina.load(tmp_path / "run").predict(x).outputs, simulation.model(x))


def test_frozen_parameters_stay_frozen_and_other_types_are_kept(tmp_path):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    simulation = trained(tmp_path / "run", model)
    run = lamina.load(tmp_path / "run")
    assert [p.requires_grad for p in run.model.parameters()] == [False, False, True, True]
    x, _ = points(3)
    assert torch.equal(run.predict(x).outputs, simulation.model(x.double()))
    assert run.evaluate(points()) == {name: simulation.history[-1][name] for name in ("loss", "accuracy")}


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_raw_images_are_normalised_as_in_training(tmp_path):
    pixels = torch.randint(0, 256, (40, 3, 6, 6), dtype=torch.uint8)
    data = lamina.Dataset(pixels, torch.arange(40) % 2, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    simulation = trained(tmp_path / "run", nn.Sequential(nn.Flatten(), nn.Linear(108, 2)), data)
    run = lamina.load(tmp_path / "run")
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (data.mean, data.std))
    expected = simulation.model((pixels / 255 - mean) / std)
    assert torch.allclose(run.predict(pixels.numpy()).outputs, expected, atol=1e-6)
    with pytest.raises(lamina.BadInput, match="only uint8 images are divided by 255"):
        run.predict(pixels / 255)
    with pytest.raises(lamina.BadInput, match=r"one sample of shape \[3, 6, 6\].*x\[None\]"):
        run.predict(pixels[0])
    with pytest.raises(lamina.BadInput, match="the model fails for"):
        run.predict(pixels[:, :, :3])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids, attention_mask):
        summed = (self.words(ids) * attention_mask.unsqueeze(2)).sum(1)
        return {"logits": self.head(summed), "sums": summed}


def test_token_ids_of_other_lengths_are_padded_with_their_mask(tmp_path):
    ids = [[1, 2, 3], [4, 5], [6], [7, 8]] * 5
    data = ({"ids": ids}, ["a", "b", "c", "a"] * 5)
    simulation = trained(tmp_path / "run", Tagger(), data)
    predictions = lamina.load(tmp_path / "run").predict({"ids": [[9, 9], [1]], "unused": [0, 0]})
    expected = simulation.model(torch.tensor([[9, 9], [1, 0]]), torch.tensor([[1, 1], [1, 0]]))
    assert torch.equal(predictions.outputs["logits"], expected["logits"])
    assert torch.equal(predictions.outputs["sums"], expected["sums"])
    names = np.array(["a", "b", "c"])
    assert predictions.classes.tolist() == names[expected["logits"].argmax(1)].tolist()
    with pytest.raises(lamina.BadInput, match="no 'ids'"):
        lamina.load(tmp_path / "run").predict({"idz": [[1]]})


class Two(nn.Module):
    def forward(self, left, right):
        return self.head(torch.cat([left, right], 1))

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 2)


def test_several_inputs_are_a_tuple(tmp_path):
    x, y = points()
    simulation = trained(tmp_path / "run", Two(), ((x[:, :2], x[:, 2:]), y))
    run = lamina.load(tmp_path / "run")
    assert torch.equal(run.predict((x[:, :2].tolist(), x[:, 2:])).outputs, simulation.model(x[:, :2], x[:, 2:]))
    with pytest.raises(lamina.BadInput, match="must be a tuple of 2 inputs"):
        run.predict(x)


def test_columns_of_a_table_are_found_by_name_and_prepared_as_in_training(tmp_path):
    table = pandas.DataFrame({"age": [30.0, None, 50.0, 60.0] * 5, "ward": ["n", "s"] * 10, "ill": ["no", "yes"] * 10})
    data = lamina.data.as_dataset(table, y="ill", preprocessing={"categorical": ["ward"], "missing": "mean"})
    simulation = trained(tmp_path / "run", nn.Linear(4, 2), data)
    run = lamina.load(tmp_path / "run")
    new = pandas.DataFrame({"id": [1, 2], "ward": ["s", "n"], "age": [40.0, None]})
    mean = 140 / 3  # of the training rows
    expected = simulation.model(torch.tensor([[40.0, 0, 0, 1], [mean, 1, 1, 0]]))
    assert torch.allclose(run.predict(new).outputs, expected)
    with pytest.raises(lamina.BadInput, match="no column 'age'"):
        run.predict(new.drop(columns="age"))
    with pytest.raises(lamina.BadInput, match="does not know which column is the label"):
        run.evaluate(table)
    whole = lamina.data.as_dataset(table, y="ill", preprocessing=run.preprocessing)
    assert run.evaluate(whole)["accuracy"] == simulation.history[-1]["accuracy"]


def test_whole_numbers_are_taken_for_floats_but_not_the_other_way_round(tmp_path):
    simulation = trained(tmp_path / "run")
    assert torch.equal(lamina.load(tmp_path / "run").predict([[1, 2, 3, 4, 5]]).outputs,
                       simulation.model(torch.tensor([[1.0, 2, 3, 4, 5]])))  # fmt: skip
    x, y = points()
    with pytest.raises(lamina.BadInput, match=r"a pair: give the inputs alone"):
        lamina.load(tmp_path / "run").predict((x, y))
    ids = (torch.randint(0, 9, (20, 3)), torch.arange(20) % 2)
    trained(tmp_path / "ids", nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 2)), ids)
    with pytest.raises(lamina.BadInput, match="trained on whole numbers"):
        lamina.load(tmp_path / "ids").predict([[0.5, 1.0, 2.0]])


# --- predictions ------------------------------------------------------------------------------------------------------


def test_probabilities_follow_from_the_loss(tmp_path):
    x, y = points()
    soft = lamina.load(_run(tmp_path / "ce", nn.Linear(5, 2), (x, y))).predict(x)
    assert torch.allclose(soft.probabilities, soft.outputs.softmax(1))
    logs = nn.Sequential(nn.Linear(5, 2), nn.LogSoftmax(1))
    logged = lamina.load(_run(tmp_path / "nll", logs, (x, y), loss="nll")).predict(x)
    assert torch.allclose(logged.probabilities, logged.outputs.exp())
    weighted = lamina.losses.CrossEntropy(weight=[1.0, 2.0])
    run = lamina.load(_run(tmp_path / "weighted", nn.Linear(5, 2), (x, y), loss=weighted))
    assert torch.allclose(run.predict(x).probabilities, run.predict(x).outputs.softmax(1))
    expected = weighted(run.predict(x).outputs, y).mean()
    assert run.evaluate((x, y))["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_one_logit_is_the_class_1(tmp_path):
    x, y = points()
    names = np.array(["no", "yes"])[y.numpy()]
    predictions = lamina.load(_run(tmp_path / "run", nn.Linear(5, 1), (x, names), loss="bce")).predict(x)
    assert torch.allclose(predictions.probabilities, predictions.outputs.sigmoid())
    assert predictions.classes.tolist() == np.array(["no", "yes"])[(predictions.outputs[:, 0] > 0).long()].tolist()
    frame = predictions.to_pandas()
    assert list(frame) == ["prediction", "probability_no", "probability_yes"]
    assert np.allclose(frame["probability_no"] + frame["probability_yes"], 1)


def test_a_regression_has_numbers_and_no_classes(tmp_path):
    x, _ = points()
    one = lamina.load(_run(tmp_path / "one", nn.Linear(5, 1), (x, x[:, 0]), loss="mse")).predict(x)
    assert (one.classes, one.labels, one.probabilities) == (None, None, None)
    assert one.to_pandas()["prediction"].tolist() == one.outputs.flatten().tolist()
    targets = pandas.DataFrame(x[:, :2].numpy(), columns=["north", "south"])
    two = lamina.load(_run(tmp_path / "two", nn.Linear(5, 2), (x, targets), loss="mse")).predict(x)
    assert list(two.to_pandas()) == ["prediction_north", "prediction_south"]


def test_several_labels_have_a_probability_each(tmp_path):
    x, _ = points()
    predictions = lamina.load(_run(tmp_path / "run", nn.Linear(5, 3), (x, (x[:, :3] > 0).float()), loss="bce")).predict(
        x
    )
    assert predictions.classes is None
    assert torch.allclose(predictions.probabilities, predictions.outputs.sigmoid())
    assert list(predictions.to_pandas()) == ["prediction_0", "prediction_1", "prediction_2"]


def test_maps_have_a_class_everywhere_and_are_no_table(tmp_path):
    images = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8)
    run = lamina.load(_run(tmp_path / "run", nn.Conv2d(1, 3, 1), (images, torch.randint(0, 3, (20, 4, 4)))))
    predictions = run.predict(images[:5])
    assert predictions.classes.shape == (5, 4, 4)
    assert predictions.probabilities.shape == (5, 3, 4, 4)
    with pytest.raises(lamina.BadInput, match="no row of a table"):
        predictions.to_pandas()


def test_batches_are_joined_in_order(tmp_path):
    simulation = trained(tmp_path / "run")
    x, _ = points(2345, seed=3)
    predictions = lamina.load(tmp_path / "run").predict(x)
    assert len(predictions) == 2345
    assert torch.allclose(predictions.outputs, simulation.model(x), atol=1e-6)


def test_nothing_of_the_folder_is_a_pickle(tmp_path):
    trained(tmp_path / "run")
    kinds = {file.suffix for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert kinds <= {".json", ".jsonl", ".txt", ".safetensors", ""}
    facts = json.loads((tmp_path / "run" / "model.json").read_text())
    facts["model"]["layers"] = {"layer": "functional", "options": {}}
    (tmp_path / "run" / "model.json").write_text(json.dumps(facts))
    with pytest.raises(lamina.BadInput, match="functional"):
        lamina.load(tmp_path / "run")


def _run(folder, model, data, **settings):
    trained(folder, model, data, **settings)
    return folder


class Several(nn.Linear):
    def __init__(self):
        super().__init__(5, 2)

    def forward(self, x):
        return super().forward(x), {"inputs": x}, "a note"


def test_a_tuple_of_outputs_is_kept_whole(tmp_path):
    simulation = trained(tmp_path / "run", Several)
    x, _ = points(1500, seed=4)  # more than one batch
    predictions = lamina.load(tmp_path / "run").predict(x)
    logits, held, note = predictions.outputs
    assert torch.allclose(logits, simulation.model(x)[0], atol=1e-6)
    assert torch.equal(held["inputs"], x)
    assert note == "a note"
    assert predictions.labels.tolist() == logits.argmax(1).tolist()


def test_private_parts_are_said_to_be_untrained(tmp_path, caplog):
    trained(tmp_path / "run", nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), private=["1.*"], test=None)
    run, (x, _) = lamina.load(tmp_path / "run"), points(3)
    run.client(1).predict(x)
    assert "private parts" not in caplog.text
    for _ in range(2):
        run.predict(x)
    assert caplog.text.count("private parts") == 1
    assert "the private parts of the shared model (1.*) have the values from before round 1" in caplog.text
    assert caplog.text.rstrip().endswith("use run.client(0) (lamina predict --client 0)")


def test_the_warning_of_untrained_parts_calls_a_client_as_the_run_does(tmp_path, caplog):
    halves = {"north": points(), "south": points()}
    lamina.Simulation(nn.Linear(5, 2), halves, "fedavg", private=["bias"], out=tmp_path / "run").run(1)
    run, (x, _) = lamina.load(tmp_path / "run"), points(3)
    run.predict(x)
    assert caplog.text.rstrip().endswith("use run.client('north') (lamina predict --client north)")
    assert run.client("north").client_name == "north"
    run.config["federation"], run._has_warned = {}, False
    run.predict(x)
    assert caplog.text.rstrip().endswith("those of the clients never leave their nodes")


def two_losses(outputs, targets):
    left, right = outputs
    return nn.functional.mse_loss(left, targets["left"], reduction="none").mean(1) + (right - targets["right"]).abs()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x):
        return self.left(x), self.right(x).squeeze(1)


def test_several_targets_and_outputs(tmp_path):
    x, _ = points()
    data = (x, {"left": x[:, :2], "right": x[:, 2]})
    simulation = trained(tmp_path / "run", Heads(), data, loss=two_losses)
    run = lamina.load(tmp_path / "run")
    for mine, expected in zip(run.predict(x).outputs, simulation.model(x), strict=True):
        assert torch.equal(mine, expected)
    assert run.predict(x).classes is None
    assert run.evaluate(data)["loss"] == simulation.history[-1]["loss"]


def surprise(outputs, targets):
    return outputs["spread"].exp().mean(1) + (outputs["mean"] - targets).square()


class Named(Heads):
    def forward(self, x):
        return {"mean": self.right(x).squeeze(1), "spread": self.left(x)}


@pytest.mark.parametrize("targets", [torch.randn(60), torch.arange(60) % 3], ids=["numbers", "classes"])
def test_a_dict_without_logits_has_a_column_for_every_number(tmp_path, targets):
    x, _ = points()
    trained(tmp_path / "run", Named(), (x, targets), loss=surprise)
    predictions = lamina.load(tmp_path / "run").predict(x)
    assert (predictions.probabilities, predictions.labels, predictions.classes) == (None, None, None)
    table = predictions.to_pandas()
    assert list(table) == ["prediction_mean", "prediction_spread_0", "prediction_spread_1"]
    outputs = torch.cat([predictions.outputs["mean"][:, None], predictions.outputs["spread"]], 1)
    assert torch.equal(torch.tensor(table.to_numpy(), dtype=torch.float32), outputs)
    run = lamina.load(tmp_path / "run", model=functools.partial(Maps))
    with pytest.raises(
        lamina.BadInput, match=r"\['spread'\] \(Tensor of shape \[60, 1, 2\]\).*use predictions.outputs"
    ):
        run.predict(x).to_pandas()


class Maps(Named):
    def forward(self, x):
        outputs = super().forward(x)
        return outputs | {"spread": outputs["spread"].unsqueeze(1)}


# --- rows of tables -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["prepared", "numbers"])
def table_run(request, tmp_path):
    """A run on a table, and three new rows of it."""
    table = pandas.DataFrame({"age": np.arange(40) % 7, "ward": ["n", "s"] * 20, "dose": np.arange(40) / 40})
    y = ["ill" if age > 3 else "well" for age in table["age"]]
    if request.param == "prepared":
        data = lamina.data.as_dataset(
            table.assign(y=y), y="y", preprocessing={"categorical": ["ward"], "standardise": True}
        )
    else:
        table = table.drop(columns="ward")
        data = (table, y)
    lamina.Simulation("mlp", data, "fedavg", clients=2, lr=0.1, device="cpu", out=tmp_path / "run").run(3)
    return lamina.load(tmp_path / "run"), table[::-1].head(3).reset_index(drop=True)


def test_rows_of_a_table_may_be_a_row_dicts_or_a_list_of_dicts(table_run):
    run, new = table_run
    expected = run.predict(new).outputs
    for form in (new.to_dict("records"), new.to_dict("list"), {name: new[name] for name in new}):
        assert torch.equal(run.predict(form).outputs, expected)
    for row in (new.iloc[1], new.iloc[1].to_dict()):
        assert torch.equal(run.predict(row).outputs, run.predict(new[1:2]).outputs)


def test_odd_tables_are_refused_in_one_line(table_run):
    run, new = table_run
    for odd, problem in {
        "two columns": (pandas.concat([new, new[["age"]]], axis=1), "age"),
        "text": (new.assign(age=["1", "2", "3"]), r"column 'age'.* (numbers as text|holds no numbers)"),
        "other names": (new.rename(columns={"age": "Age"}), "no column 'age'; did you mean 'Age'"),
        "empty": (new.head(0), "the data set is empty"),
        "a dict without a column": ({"age": 3}, "no column '(ward|dose)'"),
        "a list without one": ([{"age": 3}], "no column '(ward|dose)'"),
    }.values():
        with pytest.raises(lamina.BadInput, match=problem) as refused:
            run.predict(odd)
        assert "\n" not in str(refused.value)


def test_an_array_in_place_of_a_table_is_said_to_be_taken_as_prepared(table_run, caplog):
    run, new = table_run
    run.predict(np.zeros((2, run._like.x.shape[1]), np.float32))
    run.predict([[0.0] * run._like.x.shape[1]] * 2)
    run.predict(new)
    assert caplog.text.count("features that are prepared already") == (run.preprocessing is not None)
