"""Losses of one example, written from their formulas, for comparison with the likelihoods."""

import math

import torch

from laplace_debias import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    MultiLabel,
    Ordinal,
    Poisson,
)

W3 = (0.5, 2.0, 1.25)
P3 = (3.0, 0.4, 1.0)
IGNORED = -100


def cross_entropy(f, y, weights=(1.0, 1.0, 1.0), smoothing=0.0):
    """−Σ_c w_c ((1 − ε) q_c + ε / C) log p_c of logits `[C]` and an index or probabilities."""
    if (y.ndim == 0 and y == IGNORED) or (y.ndim and (y == IGNORED).all()):
        return f.sum() * 0
    total = 0.0
    for c in range(len(f)):
        q = y[c] if y.ndim else float(y == c)
        t = weights[c] * ((1 - smoothing) * q + smoothing / len(f))
        total = total - t * (f[c] - torch.logsumexp(f, 0))
    return total


def binary(f, y, weights=(1.0, 1.0, 1.0), positive=(1.0, 1.0, 1.0)):
    """−Σ_c w_c (π_c y_c log p_c + (1 − y_c) log(1 − p_c)) of logits `[C]` and labels."""
    y = y.reshape(f.shape).to(f.dtype)
    if (y == IGNORED).all():
        return f.sum() * 0
    total = 0.0
    for c in range(len(f)):
        loss_of_one = torch.log1p((-f[c]).exp())  # −log p_c
        loss_of_zero = torch.log1p(f[c].exp())  # −log(1 − p_c)
        loss = positive[c] * y[c] * loss_of_one + (1 - y[c]) * loss_of_zero
        total = total + weights[c] * loss
    return total


def normal(f, y):
    """−log N(y | m, exp(v)) of C means m and C log-variances v, which f contains."""
    size = len(f) // 2
    y = y.reshape(-1)
    total = 0.0
    for c in range(size):
        variance = f[size + c].exp()
        total = total + (y[c] - f[c]) ** 2 / (2 * variance)
        total = total + 0.5 * (2 * math.pi * variance).log()
    return total


def poisson(f, y):
    """−Σ_c log Poisson(y_c | exp(f_c)) of logarithms of rates, and counts."""
    total = 0.0
    for c, count in enumerate(y.reshape(-1).tolist()):
        total = total + f[c].exp() - count * f[c] + math.log(math.factorial(int(count)))
    return total


THRESHOLDS = (-1.0, 0.3, 2.0)


def ordinal(f, y):
    """−log(σ(t_y − f) − σ(t_{y−1} − f)) of one output."""
    y = int(y)
    at_most = torch.sigmoid(THRESHOLDS[y] - f[0]) if y < 3 else 1.0
    below = torch.sigmoid(THRESHOLDS[y - 1] - f[0]) if y > 0 else 0.0
    return -(at_most - below).log()


def gaussian(*sigma):
    """Return −log N(y | f, σ²) as a function of means and targets, with one σ or one per output."""

    def loss(f, y):
        total = 0.0
        for c in range(len(f)):
            s = sigma[c % len(sigma)]
            total = total + ((y[c] - f[c]) / s) ** 2 / 2 + 0.5 * math.log(2 * math.pi * s**2)
        return total

    return loss


def soft(*shape, generator):
    y = torch.rand(*shape, 3, generator=generator, dtype=torch.float64)
    return y / y.sum(-1, keepdim=True)


def indices(*shape, generator):
    y = torch.randint(3, shape, generator=generator)
    y.view(-1)[1] = IGNORED
    return y


def ignored_soft(*shape, generator):
    y = soft(*shape, generator=generator)
    y.view(-1, 3)[1] = IGNORED
    return y


def zero_one(size):
    return lambda *shape, generator: torch.randint(2, (*shape, size), generator=generator)


def reals(size):
    return lambda *shape, generator: torch.randn(
        *shape, size, generator=generator, dtype=torch.float64
    )


def classes(number):
    return lambda *shape, generator: torch.randint(number, shape, generator=generator)


def counts(size):
    return lambda *shape, generator: torch.randint(5, (*shape, size), generator=generator)


# The likelihood, the number of outputs, a function for targets of a shape, and the loss of one
# example.
STANDARD = {
    "classification": (Categorical(), 3, indices, cross_entropy),
    "one logit": (Bernoulli(), 1, zero_one(1), binary),
    "regression": (Gaussian(0.7), 3, reals(3), gaussian(0.7)),
    "one sigma an output": (Gaussian([0.3, 1.0, 2.0]), 3, reals(3), gaussian(0.3, 1.0, 2.0)),
}
CASES = {
    "class weights": (
        Categorical(class_weights=W3), 3, indices, lambda f, y: cross_entropy(f, y, W3),
    ),
    "a class of weight zero": (
        Categorical(class_weights=[0.0, 2.0, 1.0]), 3, indices,
        lambda f, y: cross_entropy(f, y, (0.0, 2.0, 1.0)),
    ),
    "label smoothing": (
        Categorical(label_smoothing=0.2), 3, indices,
        lambda f, y: cross_entropy(f, y, smoothing=0.2),
    ),
    "class weights and smoothing": (
        Categorical(class_weights=W3, label_smoothing=0.2), 3, indices,
        lambda f, y: cross_entropy(f, y, W3, 0.2),
    ),
    "soft": (Categorical(), 3, soft, cross_entropy),
    "soft, weights, smoothing": (
        Categorical(class_weights=W3, label_smoothing=0.1), 3, ignored_soft,
        lambda f, y: cross_entropy(f, y, W3, 0.1),
    ),
    "binary": (
        Bernoulli(positive_weight=3.0), 1, zero_one(1),
        lambda f, y: binary(f, y, positive=(3.0,)),
    ),
    "several labels": (MultiLabel(ignore_index=-1), 3, zero_one(3), binary),
    "positive weights": (
        MultiLabel(positive_weights=P3), 3, zero_one(3), lambda f, y: binary(f, y, positive=P3),
    ),
    "label weights": (
        MultiLabel(label_weights=W3, positive_weights=2.5), 3, zero_one(3),
        lambda f, y: binary(f, y, W3, (2.5,) * 3),
    ),
    "heteroscedastic": (HeteroscedasticGaussian(), 4, reals(2), normal),
    "ordered classes": (Ordinal(THRESHOLDS), 1, classes(4), ordinal),
    "counts": (Poisson(), 2, counts(2), poisson),
}  # fmt: skip


# The plain losses of the likelihoods with weights.
UNWEIGHTED = {
    "class weights": cross_entropy,
    "a class of weight zero": cross_entropy,
    "class weights and smoothing": cross_entropy,
    "soft, weights, smoothing": cross_entropy,
    "binary": binary,
    "positive weights": binary,
    "label weights": binary,
}


def expected_ordinal_hessian(f):
    labels = torch.arange(4)
    hessians = [torch.autograd.functional.hessian(lambda g, y=y: ordinal(g, y), f) for y in labels]
    probabilities = [(-ordinal(f, y)).exp() for y in labels]
    return sum(p * h for p, h in zip(probabilities, hessians, strict=True))


def expected_normal_hessian(f):
    size = len(f) // 2
    return torch.diag(torch.cat([(-f[size:]).exp(), torch.full_like(f[size:], 0.5)]))


# The losses whose curvature is the expectation of the Hessian over targets, and this expectation.
EXPECTED_HESSIANS = {ordinal: expected_ordinal_hessian, normal: expected_normal_hessian}


def hessian(ell, f, y):
    """∇²_f ℓ of one example, or its expectation over y if this is the curvature."""
    if ell in EXPECTED_HESSIANS:
        return EXPECTED_HESSIANS[ell](f)
    return torch.autograd.functional.hessian(lambda g: ell(g, y), f)


def example_weight(name, f, y):
    """The mean weight of an example's terms: its Hessian divided by that of the plain loss."""
    *_, ell = CASES[name]
    if name not in UNWEIGHTED:
        return hessian(ell, f, y).any().double()
    weighted = hessian(ell, f, y).diagonal()
    plain = hessian(UNWEIGHTED[name], f, y).diagonal()
    return (weighted / plain).nan_to_num(0.0).mean()


def gradient(ell, f, y):
    return torch.autograd.functional.jacobian(lambda g: ell(g, y), f)


def root(ell, f, y):
    """Rows `[C, C]` whose outer products add up to the Hessian."""
    values, vectors = torch.linalg.eigh(hessian(ell, f, y))
    return (vectors * values.clamp_min(0).sqrt()).T
