"""Predictions of a method for a set: one table, each column a tensor with a row an example.

Columns of classes and labels are `log_probs` (logarithms of probabilities `[n, C]`; of labels that
apply or not their logits), `aleatoric` (nats) and the scores of `SCORES`, `[n]`, NaN where they are
not known; of a regression `mean`,
`standard_deviation` (with the noise) and `epistemic` (without), `[n, C]`. All are float64 on the
CPU; beside them are `index`, positions in the set, and `targets`.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias import metrics
from laplace_debias.curvature.network.batches import Batches, BatchReader
from laplace_debias.curvature.network.inputs import Inputs, call, move, num_examples, take
from laplace_debias.laplace import Laplace, links
from laplace_debias.laplace.decomposition import scores_of_moments, uncertainty_of_draws
from laplace_debias.laplace.predictive import mean_logits
from laplace_debias.metrics.ood import label_entropy
from laplace_debias.operators.eigh import eigh
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.shares import dealt
from laplace_debias.sources.task import REGRESSIONS
from laplace_debias.system.ranks import current

Table = dict[str, Tensor]

SCORES = ("mutual_information", "variance", "instability", "energy", "max_logit")
"""Scores besides those of the probabilities: the first three of posteriors, which have the energy
and the largest logit of the network; these are the network's alone."""
MOST_OUTPUTS = 100
"""Of more outputs the covariance costs too much: their variances are found alone, the common part
included, and neither mutual information, aleatoric uncertainty nor instability is known."""


def chosen_positions(num_examples: int, wanted: int | None, seed: int) -> Tensor | None:
    """Which examples of a set a method predicts: ascending positions, or None for all.

    Sets of one size give the same positions, so that corrupted examples are those of the test set.
    """
    if wanted is None or wanted >= num_examples:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_examples, generator=generator)[:wanted].sort().values


class Chosen:
    """Batches on the model's device, of all examples or of those at ascending positions.

    Several processes have every n-th batch each.
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
            if self._chosen is None:
                yield first, move(x, device, None), y
                continue
            start, end = torch.searchsorted(
                self._chosen, torch.tensor([first, first + num_examples(x)])
            ).tolist()
            if start < end:
                some = self._chosen[start:end] - first
                yield start, move(take(x, some), device, None), y[some]
            if end == len(self._chosen):
                return


@torch.no_grad()
def network_outputs(model: nn.Module, x: Inputs) -> Float[Tensor, "batch outputs"]:
    """Outputs of the trained network, finite `[B, C]`, float64 on the CPU."""
    outputs = call(model, x)
    if outputs.ndim != 2:
        raise ValueError(
            f"the network's outputs have the shape {tuple(outputs.shape)}; what can be judged is "
            "one row of outputs an example, [B, C]"
        )
    if not outputs.isfinite().all():
        raise ValueError("the network gives outputs that are not finite: check inputs and weights")
    return outputs.double().cpu()


def of_network(outputs: Float[Tensor, "n outputs"], task: str, sigma: float | None) -> Table:
    """Predictions of the trained network; `sigma` is the noise of `regression`, else None."""
    if task == "heteroscedastic":
        mean, log_variance = outputs.chunk(2, 1)
        deviation = (log_variance / 2).exp()
        return {"mean": mean, "standard_deviation": deviation, "epistemic": 0 * deviation}
    if sigma is not None:
        spread = torch.full_like(outputs, sigma)
        return {"mean": outputs, "standard_deviation": spread, "epistemic": 0 * spread}
    if task != "classification":
        return {"log_probs": outputs} | _unknown(len(outputs))
    scores = {"energy": metrics.energy(outputs), "max_logit": metrics.max_logit(outputs)}
    return {"log_probs": outputs.log_softmax(1)} | _unknown(len(outputs)) | scores


def _unknown(n: int) -> Table:
    names = ("aleatoric", *SCORES)
    return {name: torch.full((n,), torch.nan, dtype=torch.float64) for name in names}


def of_laplace(la: Laplace, x: Inputs, task: str) -> Table:
    """Predictions of a Laplace posterior, `method="glm"` in closed form."""
    if task in REGRESSIONS:
        outputs, variances = la.functional(x, diagonal=True)
        marginals = la.likelihood.marginals(outputs, variances)
        # With predicted noise the outputs are means and log-variances.
        num_targets = marginals.mean.shape[1]
        return {
            "mean": marginals.mean.double().cpu(),
            "standard_deviation": marginals.stddev.double().cpu(),
            "epistemic": variances[:, :num_targets].double().sqrt().cpu(),
        }
    is_small = network_outputs(la.model, take(x, slice(1))).shape[1] <= MOST_OUTPUTS
    mean, covariance = la.functional(x, diagonal=not is_small)
    link = la.link or links.default_link(la.likelihood, mean.shape)
    predictive: Any = links.predictive(la.likelihood, link, mean, covariance)
    of_labels = getattr(predictive, "base_dist", predictive)
    log_probs = of_labels.logits.reshape(mean.shape).double().cpu()
    # As in the link, all that is computed of the logits is computed of the divided ones.
    mean, covariance = links.tempered_moments(link, mean.double(), covariance.double())
    variances = covariance.diagonal(dim1=-2, dim2=-1) if is_small else covariance
    table = _unknown(len(mean)) | {"variance": variances.mean(1).cpu()}
    if is_small:
        # At the Sobol points that links take, the same for every example.
        values, vectors = eigh(covariance.cpu(), "the functional covariance")
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        points = links.normal_points(mean.shape[1])
        draws = mean.cpu() + torch.einsum("bij,sj->sbi", root, points)
        parts = uncertainty_of_draws([la.likelihood], [draws])
        table["aleatoric"] = parts.aleatoric
        table["mutual_information"] = parts.epistemic
        scores = scores_of_moments(la.likelihood, mean.unsqueeze(0), covariance.unsqueeze(0))
        table |= {name: score.cpu() for name, score in scores.items()}
    return {"log_probs": log_probs, **table}


def predict_set(
    loaded: Loaded,
    batches: Batches,
    la: Laplace | None,
    positions: Tensor | None,
    sigma: float | None,
) -> tuple[Table, float]:
    """Predict a set with a posterior, or with the network itself, in all processes.

    The seconds are those of the slowest process, without reading data.
    """
    columns: dict[str, list[Tensor]] = {}
    seconds = 0.0
    for place, x, y in Chosen(loaded.model, batches, positions).placed():
        start = time.perf_counter()
        if la is None:
            table = of_network(network_outputs(loaded.model, x), loaded.task, sigma)
        else:
            table = of_laplace(la, x, loaded.task)
        seconds += time.perf_counter() - start
        table |= {"targets": y.detach().cpu(), "index": torch.arange(place, place + len(y))}
        for name, column in table.items():
            columns.setdefault(name, []).append(column)
    own = {name: torch.cat(parts) for name, parts in columns.items()}
    of_ranks = [of_rank for of_rank in current().exchange(own) if of_rank]
    if not of_ranks:
        raise ValueError("a set holds no example: give it some, or leave it out")
    found = {name: torch.cat([of_rank[name] for of_rank in of_ranks]) for name in of_ranks[0]}
    order = found["index"].argsort()
    found = {name: column[order] for name, column in found.items()}
    if positions is not None:
        found["index"] = positions
    return found, max(current().exchange(seconds))


def with_temperature(table: Table, temperature: float, task: str) -> Table:
    """The same divided by a temperature; what is known of the posterior is not of these."""
    log_probs = table["log_probs"].double() / temperature
    log_probs = log_probs.log_softmax(1) if task == "classification" else log_probs
    return table | {"log_probs": log_probs} | _unknown(len(log_probs))


def mixed(tables: Sequence[Table], task: str) -> Table:
    """The mean of several predictives; of a regression the normal with its mean and variance.

    The mutual information is that of label, member and parameters; of what belongs to one posterior
    nothing else is known.
    """
    columns = {name: torch.stack([table[name] for table in tables]) for name in tables[0]}
    same = {name: tables[0][name] for name in ("targets", "index")}
    if task in REGRESSIONS:
        mean, between = columns["mean"].mean(0), columns["mean"].var(0, unbiased=False)
        names = ("standard_deviation", "epistemic")
        spreads = {name: (columns[name].square().mean(0) + between).sqrt() for name in names}
        return same | {"mean": mean, **spreads}
    log_probs = mean_logits(columns["log_probs"], exclusive=task == "classification")
    total, *of_members = (_entropy(one, task) for one in (log_probs, *columns["log_probs"]))
    # The chain rule: label and member, and given the member its parameters.
    apart = (total - torch.stack(of_members).mean(0)).clamp(min=0)
    mutual = apart + columns["mutual_information"].nan_to_num(0).mean(0)
    parts = {"aleatoric": columns["aleatoric"].mean(0), "mutual_information": mutual}
    return same | {"log_probs": log_probs} | _unknown(len(total)) | parts


def _entropy(log_probs: Tensor, task: str) -> Float[Tensor, " n"]:
    probs = probs_of(log_probs, task)
    return label_entropy(probs) if task == "multilabel" else metrics.entropy(probs)


def written(table: Table, task: str, has_labels: bool) -> Table:
    """The columns of `predictions/METHOD/SET.parquet`."""
    columns, kept = {"index": table["index"]}, table.keys() - {"index", "targets", "log_probs"}
    others = {name: column for name, column in table.items() if name in kept}
    if task in REGRESSIONS:
        if has_labels:
            columns["target"] = table["targets"].double().reshape(table["mean"].shape)
        return {name: _narrow(column) for name, column in {**columns, **others}.items()}
    if has_labels:
        columns["label"] = _narrow(table["targets"].long())
    columns["probs"] = probs_of(table["log_probs"], task)
    return {**columns, "entropy": _entropy(table["log_probs"], task), **others}


def probs_of(log_probs: Float[Tensor, "n outputs"], task: str) -> Float[Tensor, "n classes"]:
    """Probabilities `[n, C]`; of a binary task of both classes, `[n, 2]`."""
    if task == "classification":
        return log_probs.exp()
    return (torch.cat([-log_probs, log_probs], 1) if task == "binary" else log_probs).sigmoid()


def _narrow(values: Tensor) -> Tensor:
    """`[n]` of what has one column."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
