"""Hugging Face models, in full and with adapters, give the loop's trajectory in the stacked engine."""

import importlib.util
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.objective.layers import Layers
from small_simulations import form

transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("peft") is None:  # to import it takes seconds, so tests that need it do
    pytest.skip("could not import 'peft'", allow_module_level=True)
pytestmark = pytest.mark.long

WORDS, LENGTH, SAMPLES = 20, 8, 40


class Scores(nn.Module):
    """A model of one tensor: the class scores of a sample, or those of the word that follows."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        scores = self.model(x).logits
        return scores[:, -1] if scores.dim() == 3 else scores


# BERT and GPT-2 drop attention weights by default; the others are asked to.


def bert(**options):
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=3, **options,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, **{"attention_dropout": 0.1, **options},
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit(**options):
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.1, **{"attention_probs_dropout_prob": 0.1, **options},
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


# the option of a config that sets the dropout of attention weights
ATTENTION_DROPOUT = {
    bert: "attention_probs_dropout_prob", gpt2: "attn_pdrop", llama: "attention_dropout",
    vit: "attention_probs_dropout_prob",
}  # fmt: skip


def with_adapters(model, **options):
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options)
        return peft.get_peft_model(model, config)


def data(make):
    generator = torch.Generator().manual_seed(1)
    if make is vit:
        return torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64), torch.arange(SAMPLES) % 3
    words = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    return words, torch.arange(SAMPLES) % 3 if make is bert else words[:, 0]


def simulate(make, adapters, engine, config=None, **more):
    torch.manual_seed(0)
    model = make(**config or {})
    model = with_adapters(model, lora_dropout=0.1) if adapters else model
    settings = {"clients": 4, "partition": "iid", "batch_size": 4, "lr": 0.1, "device": "cpu"}
    return lamina.Simulation(Scores(model).double(), data(make), "fedavg", engine=engine, **settings | more)


@pytest.mark.parametrize(
    ("make", "attention", "adapters"),
    [
        (bert, "eager", False), (bert, "sdpa", True), (gpt2, "sdpa", False), (gpt2, "eager", True),
        (llama, "eager", False), (llama, "sdpa", True), (vit, "sdpa", False), (vit, "eager", True),
    ],
)  # fmt: skip
def test_models(make, attention, adapters):
    config = {"attn_implementation": attention}
    stacked, loop = (simulate(make, adapters, engine, config) for engine in ("auto", "loop"))
    undropped = simulate(make, adapters, "loop", config | {ATTENTION_DROPOUT[make]: 0.0})
    assert form(stacked) == "stacked"
    for run in (stacked, loop, undropped):
        run.run(1)
    torch.testing.assert_close(stacked.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(loop.state.server.x, undropped.state.server.x, rtol=1e-6, atol=1e-8)


def test_only_adapters_are_trained_sent_and_counted(caplog):
    with caplog.at_level("INFO", logger="lamina"):
        run = simulate(gpt2, True, "stacked")
    adapters = {name for name in run.objective.layers.names if "lora_" in name}
    assert adapters == set(run.objective.layers.names)
    row = run.run(1)[-1]
    size = run.objective.layers.size
    assert row["bytes_up"] == 4 * size * 8  # four clients, float64
    total = sum(p.numel() for p in run.model.parameters())
    assert f"the model trains {size:,} of {total:,} parameters; the others are frozen and not sent" in caplog.text
    before = run.objective.module.state_dict()
    for name, value in run.model.state_dict().items():
        assert "lora_" in name or torch.equal(value, before[name])


def test_adapters_with_nothing_to_train():
    model = with_adapters(gpt2(), inference_mode=True)
    with pytest.raises(lamina.BadInput, match=r"no trainable parameter.*inference_mode=False"):
        Layers.of(model)


def test_adapters_receive_the_mask_of_padded_sequences_and_named_inputs():
    generator = torch.Generator().manual_seed(1)
    lengths = [2 + i % 6 for i in range(SAMPLES)]
    sequences = [torch.randint(1, WORDS, (length,), generator=generator).tolist() for length in lengths]
    ids = torch.tensor([sequence + [0] * (7 - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * length + [0] * (7 - length) for length in lengths])
    ends = []
    for inputs in (sequences, {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}):
        torch.manual_seed(0)
        model = with_adapters(bert()).double()
        run = lamina.Simulation(model, (inputs, torch.arange(SAMPLES) % 3), "fedavg", clients=4, lr=0.1, device="cpu")
        run.run(1)
        ends.append(run.state.server.x)
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])
    with pytest.raises(lamina.BadInput, match="an input 'input_id', which the model's forward does not take; did you"):
        lamina.Simulation(with_adapters(bert()), ({"input_id": ids}, torch.arange(SAMPLES) % 3), "fedavg", clients=4)


def test_the_example_learns_the_next_word():
    """The perplexity falls below that of word frequencies, and is the exponential of a cross entropy by numpy."""
    from experiments.text_lora import WORDS, gpt2, load

    train, test = load(authors=6, words=200)
    torch.manual_seed(0)
    run = lamina.Simulation(
        gpt2(len(WORDS)), train, "fedlada", test=test, clients=None, partition=lamina.data.ByColumn("author"),
        batch_size=16, lr=0.1, device="cpu", engine="stacked", loss="causal_lm", metrics=["perplexity"],
    )  # fmt: skip
    reached = run.run(12).column("perplexity")
    shares = (np.bincount(train.y.flatten(), minlength=len(WORDS)) + 1) / (train.y.numel() + len(WORDS))
    assert reached[-1] < np.exp(-np.log(shares)[test.y[:, 1:]].mean()) < reached[0]
    scores = run.model.eval()(test.x).logits.detach().double().numpy()[:, :-1]
    right = np.take_along_axis(scores, test.y[:, 1:, None].numpy(), 2)[..., 0]
    assert reached[-1] == pytest.approx(np.exp((np.log(np.exp(scores).sum(2)) - right).mean()), rel=1e-5)


@pytest.mark.parametrize(("build", "loss"), [(bert, "cross_entropy"), (gpt2, "causal_lm")])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_masks_stay_in_the_stacked_engine(build, loss, padded):
    """transformers skips a mask without padding: a decision for all clients of a batch, if it looks at the mask."""
    torch.manual_seed(0)
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    lengths = torch.full((SAMPLES, 1), LENGTH)
    if padded:
        lengths[: SAMPLES // 2] = 3  # the first clients have padding, the others none
    mask = (torch.arange(LENGTH) < lengths).long()
    data = {"input_ids": tokens, "attention_mask": mask}, tokens[:, 0] % 3 if build is bert else tokens
    model, ends = build().double(), []
    for engine in ("auto", "loop"):
        run = lamina.Simulation(
            model, data, "fedavg", clients=[range(i, i + 10) for i in range(0, SAMPLES, 10)], batch_size=5, lr=0.1,
            loss=loss, engine=engine, device="cpu", seed=0,
        )  # fmt: skip
        run.run(2)
        ends.append(run.state.server.x)
        assert form(run) == ("stacked" if engine == "auto" else "loop")
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


def test_sequences_longer_than_the_positions_of_a_config_are_refused():
    data = torch.zeros(4, 17, dtype=torch.long), torch.tensor([0, 1, 2, 0])
    with pytest.raises(lamina.BadInput, match="max_position_embeddings = 16: enlarge it or shorten"):
        lamina.Simulation(bert(), data, "fedavg", clients=2)
