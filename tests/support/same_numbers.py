"""Numbers that the package computes, and that a change of its design must not change.

`same_versions.py` compares them between two versions. Each number is stored as a digest of its
bytes. If it does not depend on the basis of a null space, a projection is stored too.
"""

import hashlib
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from spectra import generator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalFisher,
    Fisher,
    Hessian,
    Jacobian,
)
from laplace_debias.laplace.links import Link
from laplace_debias.linalg import (
    cg,
    debiased_cg,
    diagonal,
    eigsh,
    frobenius_norm,
    inverse,
    logdet,
    neumann,
    spectral_density,
    spectral_norm,
    trace,
)
from laplace_debias.operators import Identity
from laplace_debias.quadratic import Quadratic

CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full")
MODES = ("full", "mini", "debiased", "crossfit")
LIKELIHOODS = ("classification", "regression", "binary", "multilabel")
BATCH = 12
EVALUATED = ("accuracy", "exact_match", "nll", "ece", "brier", "mean_entropy", "rmse")
OUTPUTS = {"classification": 3, "regression": 2, "binary": 1, "multilabel": 3}


PROBIT = Link("probit")


def with_parameters(model, dtype=torch.float64):
    """Give a model fixed parameters, which do not depend on its constructor."""
    g = generator(7)
    for parameter in model.parameters():
        scale = parameter[0].numel() ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64) * scale
    return model.to(dtype).eval()


def convolutional(num_outputs):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(),
        nn.Linear(5, num_outputs),
    )  # fmt: skip


class Tokens(nn.Module):
    """Embedded tokens, a mask, attention, one row of outputs per position."""

    def __init__(self, num_outputs):
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, num_outputs)

    def forward(self, tokens):
        h = self.table(tokens)
        h = h + self.attention(h, h, h, key_padding_mask=tokens == 0, need_weights=False)[0]
        return self.head(self.norm(h))


def targets(likelihood, shape, g):
    if likelihood == "classification":
        return torch.randint(3, shape, generator=g)
    if likelihood == "binary":
        return torch.randint(2, shape, generator=g).double()
    if likelihood == "multilabel":
        return torch.randint(2, (*shape, 3), generator=g).double()
    return torch.randn(*shape, 2, generator=g, dtype=torch.float64)


def images(likelihood="classification", num_batches=3, dtype=torch.float64):
    g = generator(1)
    batches = []
    for _ in range(num_batches):
        x = torch.randn(BATCH, 1, 4, 4, generator=g, dtype=torch.float64)
        y = targets(likelihood, (BATCH,), g)
        if y.is_floating_point():
            y = y.to(dtype)
        batches.append((x.to(dtype), y))
    return batches


def sentences():
    g = generator(2)
    batches = []
    for _ in range(3):
        tokens = torch.randint(1, 7, (8, 5), generator=g)
        lengths = torch.randint(2, 6, (8, 1), generator=g)
        is_padding = torch.arange(5) >= lengths
        y = torch.randint(3, (8, 5), generator=g)
        batches.append((tokens.masked_fill(is_padding, 0), y.masked_fill(is_padding, -100)))
    return batches


def loader(batches):
    """Return a loader that shuffles the examples of the batches."""
    inputs, labels = zip(*batches, strict=True)
    data = TensorDataset(torch.cat(inputs), torch.cat(labels))
    return DataLoader(data, batch_size=len(batches[0][1]), shuffle=True)


class Record(dict):
    """Digests of numbers by their names, and projections of portable numbers.

    A number is portable if it does not depend on the basis of a null space.
    """

    def note(self, name, value, portable=True):
        value = torch.as_tensor(value).detach().cpu().contiguous()
        digest = hashlib.blake2b(value.numpy().tobytes(), digest_size=8).hexdigest()
        projected = None
        if portable:
            flat = value.double().flatten()
            indices = torch.arange(1, len(flat) + 1, dtype=torch.float64)
            weights = 1 + (indices * 0.6180339887498949).frac()
            projected = float((flat * weights).sum())
        self[name] = [digest, projected]


def note_posterior(record, la, x, portable=True):
    """Record all results of a fitted posterior, including its file."""
    record.note("log marginal likelihood", la.log_marginal_likelihood())
    mean, covariance = la.functional(x)
    record.note("mean", mean)
    record.note("covariance", covariance)
    record.note("variances", la.functional(x, diagonal=True)[1])
    record.note("sample", la.sample(3, generator(3)), portable=False)
    # The link that was the default when the numbers were first recorded.
    link = PROBIT if la.likelihood.activation is not None else None
    for method, samples in (("glm", None), ("glm", 5), ("glm-mc", 5), ("nn", 5), ("map", None)):
        method_link = link if (method, samples) == ("glm", None) else None
        predictive = la.predict(x, method, samples, generator(4), link=method_link)
        values = predictive.probs if hasattr(predictive, "probs") else predictive.mean
        record.note(f"predict {method} {samples}", values, portable and samples is None)
        record.note(f"variance {method} {samples}", predictive.variance, portable=False)
    record.note("precision", la.posterior.precision @ torch.eye(len(la.mean), dtype=la.mean.dtype))
    with tempfile.TemporaryDirectory() as folder:
        la.save(Path(folder) / "posterior")
        content = (Path(folder) / "posterior").read_bytes()
        record.note("file", torch.frombuffer(bytearray(content), dtype=torch.uint8), False)
        again = Laplace.load(Path(folder) / "posterior", la.model)
        record.note("loaded", again.functional(x)[1])


def sharing(curvature, name="reduce"):
    """Return the option for the curvatures that it has an effect on, otherwise no option."""
    return {"sharing": name} if curvature in ("kfac", "ekfac") else {}


def make_laplace(model, curvature, joint=False, **options):
    """Make a `Laplace`, also with joint blocks for curvatures that have only one block.

    Earlier versions accepted this combination, so files may have such posteriors. The joint blocks
    only change the order of the entries.
    """
    if not joint or curvature not in ("lowrank", "full"):
        return Laplace(model, curvature=curvature, joint=joint, **options)
    la = Laplace(model, curvature=curvature, **options)
    config = replace(la._state.config, joint=True)
    la._state = replace(la._state, config=config, parameters=None)
    return la


def fits():
    for curvature, mode, likelihood in itertools.product(CURVATURES, MODES, LIKELIHOODS):
        yield f"{curvature} {mode} {likelihood}", {"curvature": curvature}, mode, likelihood, {}
    for curvature in CURVATURES:
        options = {"curvature": curvature}
        yield f"{curvature} mc", {**options, "fisher": "mc", "mc_samples": 2}, "debiased", *COMMON
        yield f"{curvature} empirical", {**options, "fisher": "empirical"}, "debiased", *COMMON
        yield f"{curvature} joint", {**options, "joint": True}, "debiased", *COMMON
        yield f"{curvature} reduce", {**options, **sharing(curvature)}, "debiased", *COMMON
        yield f"{curvature} hooks", {**options, "backend": "hooks"}, "full", *COMMON
        yield f"{curvature} small memory", {**options, "memory_bound": 40_000}, "full", *COMMON
        yield f"{curvature} last layer", {**options, "params": "last_layer"}, "debiased", *COMMON
        yield f"{curvature} weights", {**options, "params": "weights"}, "debiased", *COMMON
        yield f"{curvature} single", {**options, "factor_dtype": torch.float32}, "full", *COMMON


COMMON = ("classification", {})


def record_fit(options, mode, likelihood, fit_options):
    record = Record()
    model = with_parameters(convolutional(OUTPUTS[likelihood]))
    batches = images(likelihood)
    # Without this option, the noise is estimated.
    noise = {"sigma": 1.0} if likelihood == "regression" else {}
    la = make_laplace(model, likelihood=likelihood, prior_precision=2.0, **noise, **options)
    folds = 8 if mode == "crossfit" else None
    la.fit(loader(batches), mode=mode, generator=generator(5), folds=folds, **fit_options)
    note_posterior(record, la, batches[2][0][:4], options.get("factor_dtype") is None)
    link = PROBIT if la.likelihood.activation is not None else None
    tuned = la.tune(batches[2:], grid=[0.1, 1.0, 10.0], link=link)
    record.note("tuned", [row[tuned.metric] for row in tuned.table])
    report = la.evaluate(batches[2:], intervals=False)
    evaluated = [report[name] for name in EVALUATED if name in report]
    record.note("evaluated", evaluated, likelihood == "regression")
    return record


def record_function_space(mode, likelihood, inducing):
    """The posterior in function space, which has no sampled parameters and no dense precision."""
    record = Record()
    model = with_parameters(convolutional(OUTPUTS[likelihood]))
    batches = images(likelihood)
    noise = {"sigma": 1.0} if likelihood == "regression" else {}
    options = {"curvature": "gp", "inducing": inducing, "prior_precision": 2.0}
    la = Laplace(model, likelihood=likelihood, **noise, **options)
    la.fit(loader(batches), mode=mode, generator=generator(5))
    x = batches[2][0][:4]
    record.note("log marginal likelihood", la.log_marginal_likelihood())
    mean, covariance = la.functional(x)
    record.note("mean", mean)
    record.note("covariance", covariance)
    record.note("variances", la.functional(x, diagonal=True)[1])
    link = PROBIT if la.likelihood.activation is not None else None
    predictive = la.predict(x, link=link)
    record.note("predict", predictive.probs if hasattr(predictive, "probs") else predictive.mean)
    tuning = la.tune(batches[2:], grid=[0.1, 1.0, 10.0], link=link)
    record.note("tuned", [row[tuning.metric] for row in tuning.table])
    return record


def record_tokens(curvature, mode, name):
    record = Record()
    batches = sentences()
    la = Laplace(with_parameters(Tokens(3)), curvature=curvature, **sharing(curvature, name))
    folds = 8 if mode == "crossfit" else None
    la.fit(loader(batches), mode=mode, generator=generator(5), folds=folds)
    x = batches[2][0][:3]
    record.note("covariance", la.functional(x)[1], mode in ("full", "mini"))
    record.note("probs", la.predict(x, link=PROBIT).probs)
    record.note("log marginal likelihood", la.log_marginal_likelihood())
    return record


def record_operators():
    record = Record()
    model = with_parameters(convolutional(3))
    batches = images()
    losses = {
        "cross-entropy": nn.CrossEntropyLoss(
            weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), label_smoothing=0.1
        ),
        "summed": nn.CrossEntropyLoss(reduction="sum"),
    }
    for name, loss in losses.items():
        for kind in (Hessian, GGN, Fisher, EmpiricalFisher, KFAC, EKFAC):
            operator = kind(model, loss, batches)
            V = torch.randn(operator.shape[1], 3, generator=generator(6), dtype=torch.float64)
            record.note(f"{kind.__name__} {name}", operator @ V)
    J = Jacobian(model, batches)
    record.note("Jacobian", J @ torch.ones(J.shape[1], dtype=torch.float64))
    quadratic = Quadratic.from_data(model, nn.CrossEntropyLoss(), batches, weight_decay=0.1)
    direction = torch.ones(J.shape[1], dtype=torch.float64)
    record.note("slope", quadratic.slope(direction))
    record.note("curvature", quadratic.curvature(direction))
    return record


def record_linalg():
    record = Record()
    model = with_parameters(convolutional(3))
    batches = images()
    G = GGN(model, nn.CrossEntropyLoss(), batches[:1])
    H = GGN(model, nn.CrossEntropyLoss(), batches[1:])
    shift = 0.1 * Identity(G.shape[0], dtype=torch.float64)
    regular = G + shift
    other_regular = H + shift
    b = torch.randn(G.shape[0], generator=generator(8), dtype=torch.float64)
    for method in ("hutchinson", "hutch++"):
        estimate = trace(G, method=method, num_matvecs=12, generator=generator())
        record.note(f"trace {method}", [estimate.value, estimate.standard_error])
    estimate = diagonal(G, num_matvecs=12, generator=generator())
    record.note("diagonal hutchinson", estimate.value)
    for method in ("lanczos", "arpack", "power"):
        record.note(f"eigsh {method}", eigsh(G, k=3, method=method, generator=generator()).values)
    record.note("cg", cg(regular, b, tol=1e-8).x)
    record.note("debiased_cg", debiased_cg(regular, other_regular, b, b, max_iter=5).x)
    record.note("neumann", neumann(regular, b, num_terms=20).x)
    record.note("inverse", inverse(regular) @ b)
    density = spectral_density(regular, num_steps=10, num_probes=3, generator=generator())
    record.note("spectral_density", density.density)
    record.note("logdet", logdet(regular, generator=generator()).value)
    record.note("frobenius_norm", frobenius_norm(G, generator=generator()).value)
    record.note("spectral_norm", spectral_norm(G, generator=generator()).value)
    return record


def records():
    """Return the function that computes each record, and its arguments, by the record's name."""
    recorders = {name: (record_fit, arguments) for name, *arguments in fits()}
    for curvature, mode, shared in itertools.product(
        CURVATURES, ("full", "debiased", "crossfit"), ("expand", "reduce")
    ):
        name = f"tokens {curvature} {mode} {shared}"
        recorders[name] = (record_tokens, (curvature, mode, shared))
    for mode, likelihood, inducing in itertools.product(
        ("full", "mini", "debiased"), LIKELIHOODS, (None, 4)
    ):
        name = f"gp {mode} {likelihood} {inducing}"
        recorders[name] = (record_function_space, (mode, likelihood, inducing))
    recorders["operators"] = (record_operators, ())
    recorders["linalg"] = (record_linalg, ())
    return recorders


def compute(name):
    """Compute one record."""
    function, arguments = records()[name]
    torch.manual_seed(0)
    return function(*arguments)
