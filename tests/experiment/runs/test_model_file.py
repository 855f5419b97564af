"""``model.json``; tests/api/test_trained.py loads the models that it describes."""

import json

import pytest
import torch
from torch import nn

import lamina
from lamina.experiment.runs.model_file import MissingCode, build_loss, build_model, code_name, describe_model

LOGITS, LABELS = torch.tensor([[0.3, -1.0], [2.0, 0.5]]), torch.tensor([0, 1])


def stored_loss(tmp_path, loss):
    data = (torch.randn(20, 5), torch.arange(20) % 2)
    lamina.Simulation(nn.Linear(5, 2), data, "fedavg", clients=2, loss=loss, out=tmp_path / "run", device="cpu").run(1)
    return json.loads((tmp_path / "run" / "model.json").read_text())["loss"]


@pytest.mark.parametrize(
    "loss", ["cross_entropy", lamina.losses.cross_entropy, lamina.losses.CrossEntropy([0.1, 3.0], label_smoothing=0.2)]
)
def test_laminas_losses_are_built_with_their_values(tmp_path, loss):
    expected = lamina.losses.cross_entropy if isinstance(loss, str) else loss
    assert torch.equal(build_loss(stored_loss(tmp_path, loss))(LOGITS, LABELS), expected(LOGITS, LABELS))


@pytest.mark.parametrize(("name", "why"), [
    ("Net", r"\(it is in the script that trained it, and this process runs another one\): give it"),
    ("<lambda>", "'__main__' has no attribute '<lambda>'"),  # perhaps this script: it has no name
])  # fmt: skip
def test_a_model_of_another_script_is_missing(name, why):
    with pytest.raises(MissingCode, match=why):
        build_model(
            {"name": f"__main__:{name}", "options": {}}, lamina.data.as_dataset((torch.randn(3, 5), LABELS[[0, 1, 0]]))
        )


def test_the_values_of_a_users_object_are_not_stored(tmp_path):
    stored = stored_loss(tmp_path, nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(MissingCode, match=r"an object of your class .*CrossEntropyLoss"):
        build_loss(stored)


def spread(outputs, targets):
    return outputs.var() + targets.float().mean()


@lamina.losses.per_batch
def decorated(outputs, targets):
    return outputs.var()


@pytest.mark.parametrize("loss", [lamina.losses.per_batch(spread), decorated], ids=["wrapped", "decorated"])
def test_the_function_of_a_per_batch_loss_is_imported(tmp_path, loss):
    built = build_loss(stored_loss(tmp_path, loss))
    assert torch.equal(built(LOGITS, LABELS), loss.function(LOGITS, LABELS).expand(2))


@pytest.mark.parametrize(
    "function", [lambda outputs, targets: outputs.var(), nn.CrossEntropyLoss()], ids=["lambda", "object"]
)
def test_a_per_batch_loss_that_cannot_be_imported_must_be_given(tmp_path, function):
    loss = lamina.losses.per_batch(function)
    stored = stored_loss(tmp_path, loss)
    with pytest.raises(MissingCode, match=r"lambda|CrossEntropyLoss") as error:
        build_loss(stored)
    assert "give it, run.evaluate(data, loss=…)" in str(error.value)
    assert "\n" not in str(error.value)
    data = (torch.randn(8, 5), torch.arange(8) % 2)
    assert lamina.load(tmp_path / "run").evaluate(data, loss=loss)["loss"] > 0


def test_code_is_named_as_it_is_imported():
    assert code_name(describe_model) == "lamina.experiment.runs.model_file:describe_model"
    assert code_name(nn.Linear(1, 1)).endswith("linear:Linear")
