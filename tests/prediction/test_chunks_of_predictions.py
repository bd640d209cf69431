"""How often predictions run the network, and how much of a covariance links need."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from laplace_debias import Laplace
from laplace_debias.curvature.losses.likelihoods import Bernoulli, Categorical, Gaussian
from laplace_debias.laplace.links import FORMULAS, Link, required_moments

VOCABULARY = 7


class Decoder(nn.Module):
    """Logits of the next token at every position."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens)).cumsum(1)))


def count_passes(la, call):
    """The number of examples in each forward pass of the first layer, with a new working copy.

    A hook of the layer would be a change of the model, which takes passes of its own.
    """
    sizes = []
    place = next(iter(la.model.children())).weight.data_ptr()

    def count(module, inputs, _):
        weight = getattr(module, "weight", None)
        if weight is not None and weight.data_ptr() == place:
            sizes.append(len(inputs[0]))

    la._state.fitted_model.prediction_cache._idle.clear()
    handle = register_module_forward_hook(count)
    try:
        call()
    finally:
        handle.remove()
    return sizes


def test_the_first_example_sets_the_size_of_chunks():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    layers = [nn.Linear(3, 4), *[nn.Linear(4, 4) for _ in range(5)], nn.Linear(4, 2)]
    model = nn.Sequential(*layers).double().eval()
    la = Laplace(model, Gaussian(1.0)).fit([(x, x[:, :2])])
    assert count_passes(la, lambda: la.functional(x[:1])) == [1]
    assert count_passes(la, lambda: la.functional(x)) == [1, 9]
    expected = la.functional(x)
    # Gradients of two outputs with respect to the outputs of all Bayesian layers.
    gradient_bytes = 2 * (6 * 4 + 2) * 8
    # The pass of the first example is not repeated if it is a chunk.
    for size, sizes in ((1, [1] * 9), (2, [1, 2, 2, 2, 2, 1])):
        config = replace(la._state.config, memory_bound=size * gradient_bytes)
        la._state = replace(la._state, config=config)
        assert count_passes(la, lambda: la.functional(x)) == sizes
        torch.testing.assert_close(la.functional(x), expected)


@pytest.mark.parametrize("params", ["last_layer", "all"])
def test_a_decoder_passes_all_examples_forward_together(params):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (5, 6), generator=generator)
    la = Laplace(Decoder().double().eval(), params=params).fit([(tokens, tokens)])
    # One pass chooses the positions, and two others check the shortened head.
    num_passes_before = len(count_passes(la, lambda: la.predict(tokens, "map", positions=-1))) - 1
    sizes = count_passes(la, lambda: la.functional(tokens, positions=-1))
    assert sizes[num_passes_before:].count(5) == 1
    assert len(sizes) == len(count_passes(la, lambda: la.functional(tokens[:3], positions=-1)))
    together = la.functional(tokens, positions=-1)
    for example in range(5):
        moments = la.functional(tokens[example : example + 1], positions=-1)
        for alone, in_batch in zip(moments, together, strict=True):
            torch.testing.assert_close(alone[0], in_batch[example])


def test_the_required_moments_suffice():
    """A formula gives the same logits after a change of what it does not require."""
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    root = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT
    common = torch.randn(3, 4, 1, generator=generator, dtype=torch.float64)
    for formula in FORMULAS.values():
        expected = formula.softmax(mean, covariance, [1.0])[0].softmax(-1)
        if formula.required_moments == "variances":
            changed = covariance.diagonal(dim1=-2, dim2=-1)
        elif formula.required_moments == "covariance":
            continue
        else:
            changed = covariance + common + common.mT
        actual = formula.softmax(mean, changed, [1.0])[0].softmax(-1)
        torch.testing.assert_close(actual, expected)


def test_links_that_require_different_moments_take_the_whole_covariance():
    softmax = Categorical()
    assert required_moments(softmax, []) == "variances"
    assert required_moments(softmax, [Link("probit", 2.0), Link("probit")]) == "variances"
    assert required_moments(softmax, [Link("pairwise"), Link("exact")]) == "differences"
    assert required_moments(softmax, [Link("probit"), Link("exact")]) == "covariance"
    assert required_moments(Bernoulli(), [Link("exact")]) == "variances"
    assert required_moments(Gaussian(1.0), []) == "covariance"
