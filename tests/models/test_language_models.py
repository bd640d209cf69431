"""Language models: outputs at chosen positions, the largest ones there, wide vocabularies."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from laplace_debias import Laplace
from laplace_debias.curvature.layer_rules import base
from laplace_debias.laplace.functional import request as covariance_request

transformers = pytest.importorskip("transformers")

V, T, B = 13, 6, 3
LENGTHS = torch.tensor([6, 4, 5])


def build(kind, tied, vocabulary=V, width=8):
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "tie_word_embeddings": tied}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    if kind == "gpt2":
        config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(**sizes, intermediate_size=12)
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def batch_of(side="right", vocabulary=V):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (B, T), generator=generator)
    mask = (torch.arange(T) < LENGTHS[:, None]).long()
    mask = mask if side == "right" else mask.flip(1)
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def inputs_of(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def jacobian(model, names, x, columns):
    """Jacobians of the logits at positions `[B, p]` in all parameters, `[B, p, V, D]`."""
    parameters = {name: model.get_parameter(name).detach() for name in names}
    rows = []
    for n in range(B):
        example = {key: value[n : n + 1] for key, value in x.items()}

        def logits(values, example=example, n=n):
            outputs = functional_call(model, values, (), example, tie_weights=True)
            return outputs.logits[0, columns[n]]

        jacobians = jacrev(logits)(parameters)
        rows.append(torch.cat([jacobians[name].flatten(2) for name in names], dim=2))
    return torch.stack(rows)


def expected_moments(la, model, x, columns):
    """Logits `[B, p, V]` and the covariance of all of them, `[B, p·V, p·V]`, dense."""
    J = jacobian(model, la.param_names, x, columns).flatten(1, 2)
    covariance = J @ torch.linalg.inv(la.posterior.precision.to_dense()) @ J.mT
    with torch.no_grad():
        logits = model(**x).logits
    index = columns.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
    return logits.gather(1, index), covariance


def close(actual, expected, rtol=1e-8):
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * scale)


# The architecture, whether head and embedding are tied, and the sizes above which factors are
# diagonal: the number of outputs or inputs, and the number of entries of a shared weight.
CASES = {
    "gpt2": ("gpt2", False, None),
    "gpt2, wide": ("gpt2", False, (10, 1024)),
    "gpt2, tied": ("gpt2", True, None),
    "gpt2, tied, wide": ("gpt2", True, (10, 0)),
    "llama": ("llama", False, None),
    "llama, tied, wide": ("llama", True, (10, 0)),
}


@pytest.fixture(scope="module", params=CASES)
def fitted(request):
    kind, tied, bounds = CASES[request.param]
    model = build(kind, tied)
    with pytest.MonkeyPatch.context() as patched:
        if bounds is not None:
            patched.setattr(base, "WIDE", bounds[0])
            patched.setattr(base, "_DENSE_UP_TO", bounds[1])
        la = Laplace(model, fisher="mc", prior_precision=0.7)
        la.fit([batch_of()], generator=torch.Generator().manual_seed(2))
        # Llama computes its normalisations in single precision.
        yield la, model, 1e-8 if kind == "gpt2" else 1e-5


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_last_real_token(fitted, side):
    la, model, rtol = fitted
    x = inputs_of(batch_of(side))
    last = LENGTHS - 1 if side == "right" else torch.full((B,), T - 1)
    logits, covariance = expected_moments(la, model, x, last[:, None])
    mean, actual = la.functional(x, positions=-1)
    close(mean, logits[:, 0], rtol)
    close(actual, covariance, rtol)
    variances = covariance.diagonal(dim1=1, dim2=2)
    close(la.functional(x, positions=-1, diagonal=True)[1], variances, rtol)
    # MacKay's probit.
    shrunk = logits[:, 0] / (1 + torch.pi / 8 * variances).sqrt()
    close(la.predict(x, positions=-1).probs, shrunk.softmax(-1), rtol)


@pytest.mark.slow
def test_several_positions_and_the_largest_outputs_there(fitted):
    la, model, rtol = fitted
    x = inputs_of(batch_of("left"))
    columns = torch.tensor([[0, 5], [5, 2], [3, 3]])
    logits, covariance = expected_moments(la, model, x, columns)
    mean, actual = la.functional(x, positions=columns)
    close(mean, logits, rtol)
    close(actual, covariance, rtol)
    # 3 at each of 2 positions are fewer than 2 x 8 inputs of the head, 11 are more.
    for k in (3, 11):
        top = logits.topk(k, dim=-1)
        index = (top.indices + torch.tensor([0, V])[:, None]).flatten(1)
        rows = covariance.gather(1, index[:, :, None].expand(-1, -1, 2 * V))
        expected = rows.gather(2, index[:, None, :].expand(-1, 2 * k, -1))
        mean, actual = la.functional(x, positions=columns, outputs=k)
        close(mean, top.values, rtol)
        close(actual, expected, rtol)
        _, variances = la.functional(x, positions=columns, outputs=top.indices, diagonal=True)
        close(variances, expected.diagonal(dim1=1, dim2=2).unflatten(1, (2, k)), rtol)


@pytest.mark.slow
def test_covariance_between_inputs(fitted):
    la, model, rtol = fitted
    x = inputs_of(batch_of("left"))
    columns = torch.full((B, 1), T - 1)
    J = jacobian(model, la.param_names, x, columns).flatten(0, 2)
    expected = J @ torch.linalg.inv(la.posterior.precision.to_dense()) @ J.mT
    mean, actual = la.functional(x, positions=-1, joint=True)
    assert mean.shape == (B, V)
    close(actual, expected.view(B, V, B, V), rtol)


def test_samples_at_positions_are_those_of_all(fitted):
    la, _, rtol = fitted
    x = inputs_of(batch_of())
    index = (LENGTHS - 1)[:, None, None].expand(-1, -1, V)
    for method in ("nn", "glm-mc", "map"):
        samples = None if method == "map" else 3
        generators = [torch.Generator().manual_seed(4) for _ in range(2)]
        everywhere = la.predict(x, method, samples, generators[0]).probs
        last = la.predict(x, method, samples, generators[1], positions=-1).probs
        close(last, everywhere.gather(1, index)[:, 0], 100 * rtol)


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_vocabulary_of_a_shared_weight_is_refused_with_the_remedy(tied, monkeypatch):
    la = Laplace(build("gpt2", tied), fisher="mc").fit([batch_of()])
    monkeypatch.setattr(covariance_request, "LARGEST_DEFAULT_BYTES", 100)
    x = inputs_of(batch_of())
    assert la.functional(x, positions=-1, outputs=3)[0].shape == (B, 3)
    if not tied:
        assert la.predict(x, positions=-1).probs.shape == (B, V)
        return
    with pytest.raises(
        ValueError, match=r"outputs=k.*shares the weight of the output layer, also exclude"
    ):
        la.predict(x, positions=-1)


def test_chunks_do_not_matter(fitted):
    la, _, rtol = fitted
    x = inputs_of(batch_of())
    expected = la.functional(x, positions=[-1, -2], outputs=3, diagonal=True)[1]
    assert expected.shape == (B, 2, 3)
    state = la.fitted
    try:
        la._state = replace(state, config=replace(state.config, memory_bound=2**14))
        close(la.functional(x, positions=[-1, -2], outputs=3, diagonal=True)[1], expected, rtol)
    finally:
        la._state = state


class Regression(nn.Module):
    """A mean and two targets for every position, with a temperature behind the head."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)).cumsum(1)) / 2


@pytest.mark.parametrize("curvature", ["kfac", "full", "lowrank"])
def test_positions_of_a_head_that_does_not_give_the_outputs_itself(curvature):
    torch.manual_seed(0)
    model = Regression().double()
    x = torch.randn(4, 5, 3).double()
    y = torch.randn(4, 5, 2)
    la = Laplace(model, "regression", curvature, sigma=1.0).fit([(x, y.double())])
    mean, covariance = la.functional(x)
    by_position = covariance.unflatten(1, (5, 2)).unflatten(3, (5, 2))
    for position in (-1, 2):
        mean_at_position, variances = la.functional(x, positions=position, diagonal=True)
        close(mean_at_position, mean[:, position])
        expected = by_position[:, position, :, position]
        close(variances, expected.diagonal(dim1=1, dim2=2))
        close(la.functional(x, positions=position)[1], expected)
        close(la.marginals(x, positions=position).variance, variances + 1)
        close(la.predict(x, positions=position).covariance_matrix, expected + torch.eye(2))
    close(la.functional(x, positions=[1, 1])[0], mean[:, [1, 1]])
    assert la.marginals(x, "glm", 5, positions=[0, 3]).batch_shape == (4, 2, 2)


def test_links_and_samples_of_the_outputs():
    """The pairwise link takes the covariance of each position; draws have its moments."""
    model = build("gpt2", False)
    la = Laplace(model, fisher="mc", params=lambda name, _: "lm_head" in name)
    la.fit([batch_of()], generator=torch.Generator().manual_seed(2))
    x = inputs_of(batch_of("left"))
    everywhere = la.predict(x, link="pairwise").probs
    close(la.predict(x, link="pairwise", positions=[-1, 3]).probs, everywhere[:, [T - 1, 3]])
    close(la.predict(x, link="pairwise", positions=-1).probs, everywhere[:, T - 1])
    generator = torch.Generator().manual_seed(0)
    drawn = la.predict(x, samples=20_000, generator=generator, positions=-1).probs
    mean, covariance = la.functional(x, positions=-1)
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(V))
    noise = torch.randn(20_000, B, V, 1, generator=torch.Generator().manual_seed(1)).double()
    softmaxes = (mean + (root @ noise).squeeze(-1)).softmax(-1)
    error = 5 * (2 / 20_000) ** 0.5 * softmaxes.std(0)
    assert ((drawn - softmaxes.mean(0)).abs() < error).all()


# --------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def small():
    la = Laplace(build("gpt2", False), fisher="mc", params=lambda name, _: "lm_head" in name)
    return la.fit([batch_of()])


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (6, ValueError, "Example 0 has no position 6"),
        (-5, ValueError, "Example 1 has no position -5. It has 4 positions"),
        (5, ValueError, "Position 5 of example 1 is padding"),
        (torch.zeros(2, 1).long(), ValueError, "2 examples, but the inputs contain 3"),
        (torch.zeros(2, 1, 1).long(), ValueError, "shape"),
        ([], ValueError, "shape"),
        (torch.tensor(1.5), TypeError, "must be integers, got torch.float32"),
        (True, TypeError, "must be integers"),
    ],
)
@pytest.mark.parametrize("method", ["glm", "map"])
def test_positions_that_are_not_there(small, method, positions, error, message):
    with pytest.raises(error, match=message):
        small.predict(inputs_of(batch_of()), method, positions=positions)


def test_positions_of_outputs_without_any():
    la = Laplace(nn.Linear(2, 3)).fit([(torch.randn(4, 2), torch.randint(3, (4,)))])
    with pytest.raises(ValueError, match="Remove `positions=`"):
        la.predict(torch.randn(4, 2), positions=-1)


def test_outputs_at_positions_that_are_not_there(small):
    x = inputs_of(batch_of())
    for outputs in (V + 1, [[0, 1]] * 2, [[V]] * B):
        with pytest.raises(ValueError, match="outputs"):
            small.functional(x, positions=-1, outputs=outputs)


def test_a_mask_that_is_none_of_the_positions(small):
    x = inputs_of(batch_of("left"))
    causal = torch.ones(T, T).tril().bool().expand(B, 1, T, T)
    with pytest.raises(ValueError, match="The ends are unknown"):
        small.predict({**x, "attention_mask": causal}, positions=-1)
    tokens = x["input_ids"]
    close(small.predict(tokens, positions=-1).probs, small.predict(tokens).probs[:, -1])


@pytest.mark.slow
def test_too_many_outputs_are_refused_before_any_is_differentiated():
    model = build("gpt2", False, vocabulary=6000)
    batch = batch_of(vocabulary=6000)
    with pytest.raises(ValueError, match='Use `fisher="signs"` or "mc"'):
        Laplace(model, params=["lm_head.weight"]).fit([batch])
    la = Laplace(model, params=["lm_head.weight"], fisher="mc").fit([batch])
    with pytest.raises(ValueError, match="positions=-1` selects the last token"):
        la.predict(inputs_of(batch))
