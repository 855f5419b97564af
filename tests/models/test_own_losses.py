"""Hugging Face's architectures train on the gradient of the loss that their own library computes."""

import copy

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import lamina

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long  # the first model takes seconds to import

WORDS, SAMPLES, LR = 30, 8, 0.1
PARTS = [range(1), range(1, 4), range(4, 8)]  # of three clients; uneven
GENERATOR = torch.Generator().manual_seed(0)
TOKENS, ANSWERS = (torch.randint(3, WORDS, (SAMPLES, length), generator=GENERATOR) for length in (8, 5))
SOUND, IMAGES = (torch.randn(SAMPLES, *shape, generator=GENERATOR) for shape in ((4, 20), (3, 8, 8)))
LABELS = torch.arange(SAMPLES) % 3
LAYERS = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0,
}  # fmt: skip
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def make(kind, config, **options):
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**options))


def bart():
    options = {"vocab_size": WORDS, "max_position_embeddings": 10, "decoder_start_token_id": 2, **SPECIAL, **LAYERS}
    return make("BartForConditionalGeneration", "BartConfig", forced_eos_token_id=None, **options)()


def whisper():
    return make(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=WORDS, num_mel_bins=4, max_source_positions=10,
        max_target_positions=8, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
        **SPECIAL, **LAYERS,
    )()  # fmt: skip


def clip():
    text = {"vocab_size": WORDS, "max_position_embeddings": 10, **SMALL, **SPECIAL}
    return make(
        "CLIPModel", "CLIPConfig", text_config=text, vision_config={"image_size": 8, "patch_size": 4, **SMALL},
        projection_dim=8,
    )()  # fmt: skip


@lamina.losses.per_batch
def contrastive(outputs, targets):
    places = torch.arange(len(targets))
    return (F.cross_entropy(outputs.logits_per_text, places) + F.cross_entropy(outputs.logits_per_image, places)) / 2


@lamina.losses.per_batch
def of_the_model(outputs, targets):
    """Labels among the inputs let a model of transformers return its own loss."""
    return outputs.loss


# the model, its inputs, lamina's loss and targets, and what the model's forward needs to compute its own
CASES = {
    "distilbert": (
        make("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=WORDS, dim=16, hidden_dim=16,
             n_layers=1, n_heads=2, max_position_embeddings=8, num_labels=3, dropout=0.0, attention_dropout=0.0,
             seq_classif_dropout=0.0),
        {"input_ids": TOKENS}, "cross_entropy", LABELS, {"labels": LABELS}, "stacked",
    ),
    "bart": (bart, {"input_ids": TOKENS, "decoder_input_ids": ANSWERS}, "token_cross_entropy", ANSWERS,
             {"labels": ANSWERS}, "loop"),
    "t5": (
        make("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1,
             num_heads=2, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0),
        {"input_ids": TOKENS, "decoder_input_ids": ANSWERS}, "token_cross_entropy", ANSWERS, {"labels": ANSWERS},
        "stacked",
    ),
    "whisper": (whisper, {"input_features": SOUND, "decoder_input_ids": ANSWERS}, "token_cross_entropy", ANSWERS,
                {"labels": ANSWERS}, "stacked"),
    "clip": (clip, {"input_ids": TOKENS, "pixel_values": IMAGES}, contrastive, LABELS, {"return_loss": True}, "loop"),
    "llama": (
        make("LlamaForCausalLM", "LlamaConfig", vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=8,
             **SMALL),
        {"input_ids": TOKENS}, "causal_lm", TOKENS, {"labels": TOKENS}, "stacked",
    ),
    "mixtral": (
        make("MixtralForCausalLM", "MixtralConfig", vocab_size=WORDS, num_key_value_heads=2, num_local_experts=3,
             max_position_embeddings=8, **SMALL),
        {"input_ids": TOKENS}, "causal_lm", TOKENS, {"labels": TOKENS}, "loop",
    ),
    "mixtral with the loss of its router": (
        make("MixtralForCausalLM", "MixtralConfig", vocab_size=WORDS, num_key_value_heads=2, num_local_experts=3,
             max_position_embeddings=8, output_router_logits=True, **SMALL),
        {"input_ids": TOKENS, "labels": TOKENS}, of_the_model, LABELS, {"labels": TOKENS}, "loop",
    ),
    "mamba": (
        make("MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=1,
             expand=1, time_step_rank=2),
        {"input_ids": TOKENS}, "causal_lm", TOKENS, {"labels": TOKENS}, "stacked",
    ),
}  # fmt: skip


def part_of(values, part):
    """Return the samples of one client; options of a forward, such as return_loss=True, stay as they are."""
    return {name: value[list(part)] if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def step_of_the_library(model, values):
    """Return the mean loss and step of the clients, weighted by samples, with the loss that the model computes."""
    steps, mean = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}, 0.0
    for part in PARTS:
        model.zero_grad()
        loss = model.train()(**part_of(values, part)).loss
        loss.backward()
        mean += float(loss.detach()) * len(part) / SAMPLES
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                steps[name] -= LR * parameter.grad * len(part) / SAMPLES
    return mean, steps


@pytest.mark.parametrize("kind", CASES)
def test_a_round_follows_the_gradients_of_the_librarys_loss(kind):
    build, inputs, loss, targets, own, automatic = CASES[kind]
    torch.manual_seed(0)
    model, data = build(), (inputs, targets)
    expected, steps = step_of_the_library(copy.deepcopy(model), {**inputs, **own})
    for engine in dict.fromkeys(["loop", "captured", automatic]):
        run = lamina.Simulation(
            model, data, "fedavg", clients=PARTS, batch_size=None, lr=LR, loss=loss, test=data, metrics=["loss"],
            device="cpu", engine="auto" if engine == automatic else engine, weighting="examples",
        )  # fmt: skip
        run.run(1)
        assert run.engine.name == engine
        assert run.history[0]["train_loss"] == pytest.approx(expected, rel=1e-5)
        trained = run.model.state_dict()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(trained[name], parameter + steps[name], rtol=1e-4, atol=1e-6, msg=name)
