"""Collator dicts of Hugging Face's: a label goes with the logits that the model's loss reads."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from laplace_debias import Categorical, Laplace
from laplace_debias.curvature import GGN

transformers = pytest.importorskip("transformers")

TOKENS = {"vocab_size": 29, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTH = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
GPT = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "tie_word_embeddings": False}
BART = {
    "d_model": 8,
    "max_position_embeddings": 16,
    **{f"{stack}_layers": 1 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 12 for stack in ("encoder", "decoder")},
}
# The class, its configuration, the head, how many outputs, and whether its loss moves the labels.
MODELS = {
    "GPT2LMHeadModel": ("GPT2Config", {**GPT, **TOKENS}, "lm_head", 29, True),
    "LlamaForCausalLM": ("LlamaConfig", {**WIDTH, **TOKENS}, "lm_head", 29, True),
    # Causal by name and by `loss_type`, and yet it compares labels with logits as they are.
    "BartForCausalLM": ("BartConfig", {**BART, **TOKENS}, "lm_head", 29, False),
    "BertForMaskedLM": (
        "BertConfig",
        {**WIDTH, **TOKENS, "tie_word_embeddings": False},
        "cls.predictions.decoder",
        29,
        False,
    ),
    "BertForTokenClassification": (
        "BertConfig",
        {**WIDTH, **TOKENS, "num_labels": 4},
        "classifier",
        4,
        False,
    ),
}


def shifted(labels):
    """Each label one position earlier, where the outputs are that predict it."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def build(name):
    config, options, head, num_outputs, shifts = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if name == "BartForCausalLM":  # tied to the embedding whatever the configuration says
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model.double().eval(), head, num_outputs, shifts


def batch_of(num_outputs):
    """A collated batch of sentences of 6 and 4 tokens; labels of padding do not count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 29, (3, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    labels = torch.randint(num_outputs, (3, 6), generator=generator).masked_fill(mask == 0, -100)
    labels[0, 2] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return transformers.BatchEncoding(batch)


def own_loss(model, batch):
    """The model's own loss, a mean over the labels that it counts."""
    with torch.no_grad():
        return float(model(**batch).loss)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_models_own(name):
    model, head, num_outputs, shifts = build(name)
    batch = batch_of(num_outputs)
    la = Laplace(
        model,
        fisher="mc",
        params=[f"{head}.bias"]
        if name.startswith("Bert")
        else [next(n for n, _ in model.named_parameters() if n.startswith(head))],
    ).fit([batch])
    counted = (batch["labels"][:, 1:] if shifts else batch["labels"]) != -100
    loss = own_loss(model, batch)
    torch.testing.assert_close(la.fitted.nll, loss * int(counted.sum()), rtol=1e-6, atol=0)
    map_nll = la.evaluate([batch], method="map")["nll"]
    torch.testing.assert_close(float(map_nll), loss, rtol=1e-5, atol=0)


def test_the_model_is_not_given_the_labels():
    model, head, num_outputs, _ = build("BertForTokenClassification")
    la = Laplace(model, params="last_layer", fisher="mc")
    argument_names = []
    handle = model.register_forward_pre_hook(
        lambda _, args, named: argument_names.append(sorted(named)), with_kwargs=True
    )
    batch = batch_of(num_outputs)
    la.fit([batch])
    la.evaluate([batch], ood={"other": [batch]})
    la.predict(batch)
    handle.remove()
    # One pass of a single example with labels shows which logits the model's loss reads, and one
    # that its outputs do not depend on the labels.
    with_labels = [names for names in argument_names if "labels" in names]
    assert len(with_labels) == 2
    assert len(argument_names) > 3
    assert head == "classifier"


def test_labels_of_sequences_stay_as_they_are():
    torch.manual_seed(0)
    config = transformers.BertConfig(**WIDTH, **TOKENS, num_labels=6)
    model = transformers.BertForSequenceClassification(config).double().eval()
    ids = torch.randint(3, 29, (6, 6))
    labels = torch.arange(6)
    la = Laplace(model, params="last_layer").fit([{"input_ids": ids, "labels": labels}])
    torch.testing.assert_close(
        la.fitted.nll, 6 * float(cross_entropy(model(ids).logits, labels)), rtol=1e-6, atol=0
    )


class Bare(nn.Module):
    """A user's wrapper that gives the logits of a language model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def adapted(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("wrap", [Bare, adapted, nn.DataParallel, torch.compile])
def test_labels_move_within_wrappers_too(wrap):
    model, _, _, _ = build("GPT2LMHeadModel")
    batch = batch_of(29)
    wrapped = wrap(model)
    # PEFT puts its adapters into the model, so the loss is taken afterwards.
    expected_loss = own_loss(wrapped if wrap is adapted else model, batch)
    params = "all" if wrap is adapted else lambda name, _: name.endswith("c_attn.weight")
    la = Laplace(wrapped, fisher="mc", params=params).fit([batch])
    num_counted = int((batch["labels"][:, 1:] != -100).sum())
    torch.testing.assert_close(la.fitted.nll, expected_loss * num_counted, rtol=1e-6, atol=0)


def test_operators_move_the_labels_too():
    model, head, _, _ = build("GPT2LMHeadModel")
    batch = batch_of(29)
    names = [f"{head}.weight"]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    by_hand = [(inputs, shifted(batch["labels"]))]
    G = GGN(model, Categorical(), [batch], params=names)
    v = torch.randn(G.shape[1], dtype=torch.float64)
    torch.testing.assert_close(G @ v, GGN(model, Categorical(), by_hand, params=names) @ v)


def test_a_model_of_another_library_gets_its_labels_as_they_are():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(29, 8)
            self.head = nn.Linear(8, 29)

        def forward(self, input_ids):
            return self.head(self.table(input_ids))

    torch.manual_seed(0)
    model = Tagger().double().eval()
    ids = torch.randint(29, (2, 5))
    la = Laplace(model, params="last_layer").fit([{"input_ids": ids, "labels": ids}])
    expected = float(cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum"))
    torch.testing.assert_close(la.fitted.nll, expected, rtol=1e-6, atol=0)


def test_a_loss_that_cannot_be_asked_is_an_error():
    class Odd(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, labels=None):
            outputs = super().forward(input_ids)
            if labels is not None:
                outputs.loss = outputs.logits.square().sum()  # of all positions
            return outputs

    torch.manual_seed(0)
    model = Odd(transformers.GPT2Config(**GPT, **TOKENS)).eval()
    ids = torch.randint(3, 29, (2, 4))
    with pytest.raises(
        ValueError, match=r"The labels of Odd cannot be matched.* with the logits of \[0, 1, 2, 3\]"
    ):
        Laplace(model, params="last_layer").fit([{"input_ids": ids, "labels": ids}])
    la = Laplace(
        model,
        params="last_layer",
        batch=lambda b: ({"input_ids": b["input_ids"]}, shifted(b["labels"])),
    )
    la.fit([{"input_ids": ids, "labels": ids}])
    logits = model(ids).logits[:, :-1].double()
    expected = float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    torch.testing.assert_close(la.fitted.nll, expected, rtol=1e-6, atol=0)


def test_outputs_that_are_nan_are_no_question_of_labels():
    """Bloom returns NaN at padding on the left, to which no label belongs."""

    class Padded(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, attention_mask=None, labels=None):
            outputs = super().forward(input_ids)
            is_padding = attention_mask.unsqueeze(2) == 0
            outputs.logits = outputs.logits.masked_fill(is_padding, torch.nan)
            if labels is not None:
                logits = outputs.logits[:, :-1].flatten(0, 1)
                outputs.loss = cross_entropy(logits, labels[:, 1:].flatten())
            return outputs

    torch.manual_seed(0)
    model = Padded(transformers.GPT2Config(**GPT, **TOKENS)).eval()
    ids = torch.randint(3, 29, (2, 4))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}
    with pytest.raises(ValueError, match="outputs contain NaN"):
        Laplace(model, params="last_layer").fit([batch])


def with_prompt(kind, name="GPT2LMHeadModel"):
    """A language model with a prompt of three tokens; that of a prefix has no positions."""
    peft = pytest.importorskip("peft")
    model, *_ = build(name)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model, config).double().eval()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
@pytest.mark.parametrize(
    ("kind", "num_virtual"), [("PromptTuningConfig", 3), ("PrefixTuningConfig", 0)]
)
def test_labels_of_a_model_with_a_prompt_are_behind_the_prompt(name, kind, num_virtual):
    model = with_prompt(kind, name)
    batch = batch_of(29)
    la = Laplace(model, curvature="diag", class_dim=-1).fit([batch])
    loss = own_loss(model, batch)
    num_counted = int((batch["labels"][:, num_virtual == 0 :] != -100).sum())
    torch.testing.assert_close(la.fitted.nll, loss * num_counted, rtol=1e-5, atol=0)
    map_nll = la.evaluate([batch], method="map")["nll"]
    torch.testing.assert_close(float(map_nll), loss, rtol=1e-5, atol=0)
    labels = torch.full((3, 6 + num_virtual), -100)
    labels[:, num_virtual:] = batch["labels"]
    targets = shifted(labels)
    (parameter,) = [p for p in model.parameters() if p.requires_grad]
    precision = torch.ones(parameter.numel(), dtype=torch.float64)
    for n in range(3):
        example = {key: batch[key][n : n + 1] for key in ("input_ids", "attention_mask")}
        logits = model(**example).logits[0]
        for output, target in zip(logits, targets[n], strict=True):
            if target == -100:
                continue
            rows = [
                torch.autograd.grad(logit, parameter, retain_graph=True)[0].flatten()
                for logit in output
            ]
            J = torch.stack(rows)
            p = output.detach().softmax(0)
            precision += (p @ J.square()) - (p @ J).square()
    variance = la.posterior.covariance.to_dense().diagonal()
    torch.testing.assert_close(variance, 1 / precision, rtol=1e-6, atol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_behind_a_prompt_count_from_the_last_token(side):
    """The mask of the inputs does not contain the positions of the prompt."""
    model = with_prompt("PromptTuningConfig")
    batch = batch_of(29)
    if side == "left":
        batch = {key: value.flip(1) for key, value in batch.items()}
    la = Laplace(model, curvature="diag", class_dim=-1).fit([batch])
    everywhere = la.functional(batch)[0]
    last = torch.tensor([8, 8 if side == "left" else 6, 8])
    actual = la.functional(batch, positions=[0, -1])[0]
    torch.testing.assert_close(actual[:, 0], everywhere[:, 0])
    torch.testing.assert_close(actual[:, 1], everywhere[torch.arange(3), last])
