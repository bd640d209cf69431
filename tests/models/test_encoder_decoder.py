"""Encoder-decoder models of Hugging Face, with random weights, against dense references."""

from functools import partial

import peft
import pytest
import torch
import transformers
from oracle import close
from torch.func import functional_call

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC, EmpiricalFisher

VOCABULARY = 11
# T5's attention computes its softmax in single precision.
TOLERANCE = 1e-6
SIZES = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
TWO_STACKS = SIZES | {
    "d_model": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 4,
    "decoder_ffn_dim": 4,
    "max_position_embeddings": 8,
    "dropout": 0.0,
}
"""An encoder and a decoder of one layer each."""
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
    """Compute the Jacobians of the logits `[B, T · C, D]`, one output at a time."""
    parameters = {
        name: model.get_parameter(name).detach().clone().requires_grad_() for name in names
    }
    rows = []
    for n in range(len(inputs["input_ids"])):
        example = {key: value[n : n + 1] for key, value in inputs.items()}
        logits = functional_call(model, parameters, (), example, tie_weights=True).logits
        for f in logits.flatten():
            gradients = torch.autograd.grad(
                f, list(parameters.values()), retain_graph=True, materialize_grads=True
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
    [
        [[5, 5, 5], [3, 5, 2, 4]],
        pytest.param([[3, 5], [5, 5, 5], [4]], marks=pytest.mark.slow),
        pytest.param([[5], [2, 5, 3]], marks=pytest.mark.slow),
    ],
    ids=["padding later", "padding first", "one example"],
)
def test_t5_with_padding_in_some_batches_has_the_dense_curvature(lengths):
    """Without padding Hugging Face drops the mask, and the bias of positions is `[1, H, T, T]`."""
    model = t5()
    generator = torch.Generator().manual_seed(1)
    batches = []
    for batch_lengths in lengths:
        size = len(batch_lengths)
        tokens, mask = sequences(batch_lengths, generator)
        decoder_tokens, _ = sequences([3] * size, generator, 3)
        inputs = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": decoder_tokens}
        batches.append((inputs, torch.randint(VOCABULARY, (size, 3), generator=generator)))
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
        **TWO_STACKS,
        bos_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config).double().eval()


def marian():
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        **TWO_STACKS,
        decoder_vocab_size=VOCABULARY,
        eos_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.MarianMTModel(config).double().eval()


def adapters(make=bart, targets=("q_proj", "v_proj")):
    """A model with LoRA's adapters, none of which is zero."""
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=list(targets))
    model = peft.get_peft_model(make(), config).double().eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


t5_adapters = partial(adapters, t5, ("q", "wi"))
marian_adapters = partial(adapters, marian, ("v_proj",))


def m2m100():
    """A model without a method that makes the decoder's inputs."""
    torch.manual_seed(0)
    config = transformers.M2M100Config(
        **TWO_STACKS,
        eos_token_id=2,
    )
    return transformers.M2M100ForConditionalGeneration(config).double().eval()


m2m100_adapters = partial(adapters, m2m100, ("v_proj",))


class PassesOn(torch.nn.Module):
    """A user's module that passes all arguments to the model in it."""

    def __init__(self):
        super().__init__()
        self.translator = bart()

    def forward(self, **batch):
        return self.translator(**batch)


class TakesDecoderInputs(PassesOn):
    """A user's module with named arguments."""

    def forward(self, input_ids, attention_mask, labels=None, decoder_input_ids=None):
        return self.translator(
            input_ids, attention_mask, decoder_input_ids=decoder_input_ids, labels=labels
        )


@pytest.mark.parametrize("length", [5, 3], ids=["labels as long", "labels shorter"])
@pytest.mark.parametrize(
    "make",
    [
        bart,
        t5,
        marian,
        m2m100,
        adapters,
        t5_adapters,
        marian_adapters,
        m2m100_adapters,
        PassesOn,
        TakesDecoderInputs,
    ],
)
def test_decoder_inputs_are_made_from_the_labels(make, length):
    """A batch of the Seq2Seq trainer equals a batch with the labels shifted by a position."""
    model = make().double().eval()
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


def test_whisper_has_the_decoder_inputs_of_its_own_loss():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=3,
        d_model=4,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=4,
        decoder_ffn_dim=4,
        max_source_positions=4,
        max_target_positions=6,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config).double().eval()
    labels = torch.tensor([[3, 4, 5, 6], [7, 8, 9, -100]])
    batch = {"input_features": torch.randn(2, 3, 8).double(), "labels": labels}
    la = Laplace(model, curvature="diag", class_dim=-1).fit_batches([batch])
    with torch.no_grad():
        outputs = model(**batch)
    torch.testing.assert_close(la.fitted.nll, float(outputs.loss) * 7)
    torch.testing.assert_close(la.functional(batch, diagonal=True)[0], outputs.logits)


class NamesItsInputs(torch.nn.Module):
    """A module of a user's own that makes the decoder's inputs where nobody can pass them."""

    def __init__(self):
        super().__init__()
        self.translator = bart()

    def forward(self, input_ids, attention_mask=None, labels=None):
        if labels is None:
            return self.translator(input_ids=input_ids, attention_mask=attention_mask)
        return self.translator(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class Teacher(torch.nn.Module):
    """A recurrent decoder that is given the labels before the present one."""

    def __init__(self, uses_labels):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 4)
        self.head = torch.nn.Linear(4, VOCABULARY)
        self.uses_labels = uses_labels

    def forward(self, input_ids, labels=None):
        features = self.embedding(input_ids)
        if self.uses_labels and labels is not None:
            features = features + self.embedding(labels.roll(1, 1))
        return {"logits": self.head(features)}


def token_batch():
    generator = torch.Generator().manual_seed(2)
    tokens, mask = sequences([5, 3, 4], generator)
    labels = torch.randint(3, VOCABULARY, (3, 5), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def test_a_wrapper_that_computes_outputs_from_the_labels_is_rejected():
    model = NamesItsInputs().eval()
    original = {name: value.clone() for name, value in model.state_dict().items()}
    la = Laplace(model, curvature="diag", class_dim=-1)
    with pytest.raises(ValueError, match="uses the targets 'labels' to compute its outputs"):
        la.fit_batches([token_batch()])
    for name, value in model.state_dict().items():
        assert torch.equal(value, original[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_labels_of_inputs_to_predict_are_not_left_out_either():
    """The fit had pairs, whose inputs have no labels."""
    model = NamesItsInputs().eval()
    batch = token_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    la = Laplace(model, curvature="diag", class_dim=-1).fit_batches([(inputs, batch["labels"])])
    la.predict(inputs)
    with pytest.raises(ValueError, match="uses the targets 'labels' to compute its outputs"):
        la.predict(batch)


@pytest.mark.parametrize("operator", [GGN, EmpiricalFisher, KFAC])
def test_operators_reject_it_too(operator):
    model = NamesItsInputs().eval()
    loss = torch.nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match="uses the targets 'labels' to compute its outputs"):
        operator(model, loss, [token_batch()]).to_dense()


def test_the_users_own_decoder_is_rejected_where_it_reads_labels():
    torch.manual_seed(0)
    batch = token_batch()
    del batch["attention_mask"]
    la = Laplace(Teacher(uses_labels=True).eval(), class_dim=-1)
    with pytest.raises(ValueError, match="pass `batch=`, a function"):
        la.fit_batches([batch])
    without_labels = Laplace(Teacher(uses_labels=False).eval(), class_dim=-1).fit_batches([batch])
    assert without_labels.functional(batch, diagonal=True)[0].shape == (3, 5, VOCABULARY)


def test_the_remedy_of_the_message_works():
    """`batch=` hands the labels to the forward pass as an input."""
    torch.manual_seed(0)
    model = Teacher(uses_labels=True).double().eval()
    batch = token_batch()
    del batch["attention_mask"]
    la = Laplace(model, class_dim=-1, batch=lambda batch: (batch, batch["labels"]))
    la.fit_batches([batch])
    assert (la.posterior.covariance.to_dense().diagonal() < 1).any()
    mean, _ = la.functional(batch, diagonal=True)
    torch.testing.assert_close(mean, model(**batch)["logits"])


@pytest.mark.parametrize("likelihood", ["classification", "multilabel"])
def test_no_decoder_inputs_are_made_from_the_labels_of_a_classifier(likelihood):
    """BART's classifier decodes the tokens of the input, whatever the labels are."""
    torch.manual_seed(0)
    config = transformers.BartConfig(**TWO_STACKS, bos_token_id=0, eos_token_id=2, num_labels=3)
    model = transformers.BartForSequenceClassification(config).double().eval()
    tokens = torch.randint(3, VOCABULARY, (4, 5))
    tokens[:, -1] = 2
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    labels = torch.randint(3, (4,))
    if likelihood == "multilabel":
        labels = torch.randint(2, (4, 3)).double()
    la = Laplace(model, likelihood, curvature="diag").fit_batches([{**inputs, "labels": labels}])
    J = jacobian(model, inputs, la.param_names)
    logits = model(**inputs).logits
    if likelihood == "multilabel":
        H = torch.diag_embed(logits.sigmoid() * (-logits).sigmoid())
    else:
        probs = logits.softmax(-1)
        H = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    exact = torch.einsum("ncd,nce,ned->d", J, H, J)
    close(la.posterior.covariance.to_dense().diagonal(), 1 / (exact + 1), TOLERANCE)
