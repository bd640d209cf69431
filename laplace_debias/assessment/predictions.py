"""What a method predicts for a batch: probabilities or a mean, and how uncertain they are."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.assessment.temperature import kind_of, tempered
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs, call, move, num_examples, take
from laplace_debias.curvature.network.reader import BatchReader
from laplace_debias.laplace import Laplace
from laplace_debias.operators.eigh import eigh
from laplace_debias.sources.shares import dealt

NUM_DRAWS = 256
"""Draws of the logits that the mutual information is the mean of."""
MOST_OUTPUTS = 100
"""Of more outputs the covariance costs too much: their variances are found alone, and neither the
mutual information nor the aleatoric uncertainty is known."""


@dataclass(frozen=True)
class Predicted:
    """Predictions for n examples, on the CPU, float64.

    Attributes:
        log_probs: Of classes logarithms of their probabilities, `[n, C]`; of labels that apply or
            not the logits of theirs, `[n, C]`, of a binary task `[n, 1]`. None of a regression.
        aleatoric: Mean entropy over the posterior, nats, `[n]`.
        mutual_information: Entropy of the posterior's mean probabilities less `aleatoric`, nats.
        variance: Mean variance of the logits, `[n]`.
        mean: Of a regression the mean, `[n, C]`.
        standard_deviation: With the noise, `[n, C]`.
        epistemic: Without the noise, `[n, C]`.
        outputs: What the network itself gives, which a linearised one has as its mean, `[n, C]`.
    """

    log_probs: Tensor | None = None
    aleatoric: Tensor | None = None
    mutual_information: Tensor | None = None
    variance: Tensor | None = None
    mean: Tensor | None = None
    standard_deviation: Tensor | None = None
    epistemic: Tensor | None = None
    outputs: Tensor | None = None

    def __len__(self) -> int:
        """N, how many examples."""
        values = self.mean if self.log_probs is None else self.log_probs
        assert values is not None
        return len(values)

    def columns(self) -> dict[str, Tensor]:
        """What there is, by the attributes' names."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: values for name, values in found.items() if values is not None}

    def probs(self, task: str) -> Float[Tensor, "n classes"]:
        """Probabilities `[n, C]`; of a binary task of both classes, `[n, 2]`."""
        assert self.log_probs is not None
        if task == "classification":
            return self.log_probs.exp()
        if task == "binary":
            return torch.cat([-self.log_probs, self.log_probs], 1).sigmoid()
        return self.log_probs.sigmoid()

    def with_temperature(self, temperature: float, task: str) -> "Predicted":
        """The same divided by a temperature; what is known of the posterior is not of these."""
        assert self.log_probs is not None
        return Predicted(tempered(self.log_probs, temperature, kind_of(task)))


def entropy(probs: Float[Tensor, "*some classes"], task: str) -> Float[Tensor, "*some"]:
    """Entropy in nats; of several labels the sum over them."""
    total = torch.special.entr(probs)
    if task == "multilabel":
        total = total + torch.special.entr(1 - probs)
    return total.sum(-1)


class Chosen:
    """Batches of inputs and targets on the model's device, of all examples or of some.

    Several processes have every n-th batch each.

    Args:
        model: What takes the inputs.
        batches: The source, which can be read again.
        chosen: Positions among the examples in the order of the batches, ascending; None for all.
    """

    def __init__(self, model: nn.Module, batches: Batches, chosen: Tensor | None = None) -> None:
        self._model, self._batches, self._chosen = model, batches, chosen

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for _, x, y in self.placed():
            yield x, y

    def placed(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        """The batches, with the place of the first example among those of all processes."""
        device = next(self._model.parameters()).device
        for _, first, x, y in dealt(self._batches, BatchReader(self._model)):
            place = first
            if self._chosen is not None:
                end = first + num_examples(x)
                some = self._chosen[(self._chosen >= first) & (self._chosen < end)] - first
                if not len(some):
                    continue
                x, y = take(x, some), y[some]
                place = int((self._chosen < first).sum())
            yield place, move(x, device, None), y


@torch.no_grad()
def network_outputs(model: nn.Module, x: Inputs) -> Float[Tensor, "batch outputs"]:
    """What the trained network gives, float64 on the CPU.

    Args:
        model: The network.
        x: Inputs on its device.

    Raises:
        ValueError: If the outputs are not `[B, C]` or not finite.
    """
    outputs = call(model, x)
    if outputs.ndim != 2:
        raise ValueError(
            f"the network's outputs have the shape {tuple(outputs.shape)}; what can be judged is "
            "one row of outputs an example, [B, C]"
        )
    if not outputs.isfinite().all():
        raise ValueError("the network gives outputs that are not finite: check inputs and weights")
    return outputs.double().cpu()


def of_network(outputs: Float[Tensor, "n outputs"], task: str, sigma: float | None) -> Predicted:
    """What the trained network predicts.

    Args:
        outputs: Its outputs.
        task: As in `Loaded`.
        sigma: Standard deviation of a regression's noise.
    """
    if task == "classification":
        return Predicted(outputs.log_softmax(1), outputs=outputs)
    if task != "regression":
        return Predicted(outputs, outputs=outputs)
    assert sigma is not None
    return Predicted(
        mean=outputs,
        standard_deviation=torch.full_like(outputs, sigma),
        epistemic=torch.zeros_like(outputs),
        outputs=outputs,
    )


def of_laplace(la: Laplace, x: Inputs, task: str, num_outputs: int, seed: int) -> Predicted:
    """What a Laplace posterior predicts, `method="glm"` in closed form.

    Args:
        la: The fitted and tuned posterior.
        x: Inputs.
        task: As in `Loaded`.
        num_outputs: How many outputs the network has.
        seed: Of the draws for the mutual information, the same ones for every example, so that it
            does not depend on batches.
    """
    if task == "regression":
        mean, variances = la.functional(x, diagonal=True)
        with_noise = la.likelihood.marginals(mean, variances)
        return Predicted(
            mean=mean.double().cpu(),
            standard_deviation=with_noise.stddev.double().cpu(),
            epistemic=variances.double().sqrt().cpu(),
            outputs=mean.double().cpu(),
        )
    if num_outputs > MOST_OUTPUTS:
        mean, variances = la.functional(x, diagonal=True)
        aleatoric = information = torch.full((len(mean),), torch.nan, dtype=torch.float64)
    else:
        mean, covariance = la.functional(x)
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        aleatoric, information = _of_draws(mean, covariance, task, seed)
    # The probit link looks at variances alone.
    predictive: Any = la.likelihood.predictive(mean, variances)
    of_labels = getattr(predictive, "base_dist", predictive)
    return Predicted(
        of_labels.logits.reshape(mean.shape).double().cpu(),
        aleatoric,
        information,
        variances.double().mean(1).cpu(),
        outputs=mean.double().cpu(),
    )


def _of_draws(
    mean: Tensor, covariance: Tensor, task: str, seed: int
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Aleatoric uncertainty and mutual information, nats, from draws of the logits."""
    values, vectors = eigh(covariance.double().cpu(), "the functional covariance")
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(NUM_DRAWS // 2, mean.shape[1], generator=generator, dtype=torch.float64)
    # In pairs of opposite sign, whose mean is the logits' mean.
    noise = torch.cat([half, -half])
    steps = torch.einsum("bij,sj->sbi", root, noise)
    logits = mean.double().cpu() + steps
    probs = logits.softmax(-1) if task == "classification" else logits.sigmoid()
    if task == "binary":
        probs = torch.cat([1 - probs, probs], -1)
    aleatoric = entropy(probs, task).mean(0)
    # The entropy is concave: what is below zero is rounding.
    return aleatoric, (entropy(probs.mean(0), task) - aleatoric).clamp_min(0)
