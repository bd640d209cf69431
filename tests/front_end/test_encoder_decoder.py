"""Encoder-decoder models of Hugging Face, with random weights, against dense references."""

import pytest
import torch
import transformers
from oracle import close
from torch.func import functional_call

from laplace_debias import Laplace

VOCABULARY = 11
# T5's attention computes its softmax in single precision.
TOLERANCE = 1e-6
SIZES = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
T5 = {
    "d_model": 4,
    "d_kv": 2,
    "d_ff": 4,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 6,
    "dropout_rate": 0.0,
    "eos_token_id": 1,
}


def t5(**options):
    torch.manual_seed(0)
    config = transformers.T5Config(**SIZES | T5 | options)
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def sequences(lengths, generator, length=5):
    """Tokens with padding behind the lengths, and their mask."""
    tokens = torch.randint(3, VOCABULARY, (len(lengths), length), generator=generator)
    mask = (torch.arange(length) < torch.tensor(lengths).unsqueeze(1)).long()
    return tokens * mask, mask


def jacobian(model, inputs, names):
    """Jacobians of the logits `[B, T · C, D]`, one example and one output after the other."""
    at = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in names}
    rows = []
    for n in range(len(inputs["input_ids"])):
        example = {key: value[n : n + 1] for key, value in inputs.items()}
        logits = functional_call(model, at, (), example, tie_weights=True).logits
        for f in logits.flatten():
            gradients = torch.autograd.grad(
                f, list(at.values()), retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows).unflatten(0, (len(inputs["input_ids"]), -1))


def dense_curvature(model, batches, names):
    """`(1/N) Σ_n Σ_t J_ntᵀ H_nt J_nt` over the positions whose label counts."""
    total, size = 0, 0
    for inputs, labels in batches:
        J = jacobian(model, inputs, names).unflatten(1, (labels.shape[1], -1))
        probs = model(**inputs).logits.softmax(-1) * labels.ne(-100).unsqueeze(-1)
        H = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
        total = total + torch.einsum("ntcd,ntce,ntef->df", J, H, J)
        size += len(labels)
    return total / size


@pytest.mark.parametrize(
    "lengths",
    [[[5, 5, 5], [3, 5, 2, 4]], [[3, 5], [5, 5, 5], [4]], [[5], [2, 5, 3]]],
    ids=["padding later", "padding first", "one example"],
)
def test_t5_with_padding_in_some_batches_has_the_dense_curvature(lengths):
    """Without padding Hugging Face drops the mask, and the bias of positions is `[1, H, T, T]`."""
    model = t5()
    generator = torch.Generator().manual_seed(1)
    batches = []
    for of_batch in lengths:
        tokens, mask = sequences(of_batch, generator)
        decoder_tokens, _ = sequences([3] * len(of_batch), generator, 3)
        inputs = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": decoder_tokens}
        batches.append((inputs, torch.randint(VOCABULARY, (len(of_batch), 3), generator=generator)))
    la = Laplace(model, curvature="full", class_dim=-1).fit_batches(batches)
    assert sum("relative_attention_bias" in name for name in la.param_names) == 2
    exact = dense_curvature(model, batches, la.param_names)
    covariance = la.posterior.covariance.to_dense()
    close(covariance, torch.linalg.inv(la.num_data * exact + torch.eye(len(exact))), TOLERANCE)
    for inputs, _ in batches:
        J = jacobian(model, inputs, la.param_names)
        close(la.functional(inputs)[1], J @ covariance @ J.mT, TOLERANCE)


def bart():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        **SIZES,
        d_model=4,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=4,
        decoder_ffn_dim=4,
        max_position_embeddings=8,
        dropout=0.0,
        bos_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize("length", [5, 3], ids=["labels as long", "labels shorter"])
@pytest.mark.parametrize("make", [bart, t5])
def test_decoder_inputs_are_made_from_the_labels(make, length):
    """A batch as the Seq2Seq trainer has it is one with the labels shifted by a position."""
    model = make()
    generator = torch.Generator().manual_seed(1)
    tokens, mask = sequences([5, 3, 4], generator)
    labels = torch.randint(3, VOCABULARY, (3, length), generator=generator)
    labels[1, -1] = -100
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    la = Laplace(model, curvature="diag", class_dim=-1).fit_batches([batch])
    shifted = torch.cat([torch.zeros(3, 1, dtype=torch.long), labels[:, :-1]], 1)
    inputs = {
        "input_ids": tokens,
        "attention_mask": mask,
        "decoder_input_ids": shifted.masked_fill(shifted == -100, 0),
    }
    exact = dense_curvature(model, [(inputs, labels)], la.param_names).diagonal()
    close(la.posterior.covariance.to_dense().diagonal(), 1 / (3 * exact + 1), TOLERANCE)
    mean, _ = la.functional(batch, diagonal=True)
    torch.testing.assert_close(mean, model(**inputs).logits)
