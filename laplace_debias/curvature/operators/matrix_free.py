"""Hessian, GGN and Fisher matrices of a network's loss on a data set, as matrix-free operators."""

from dataclasses import replace
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch, scale_examples
from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.losses import Labels, Loss, OutputMap, output_loss
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.torch_losses import check_depends_on_outputs_only
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.operators.linearisation import Linearisation
from laplace_debias.curvature.operators.network_operator import (
    LINEARISATION_BYTES,
    Item,
    MapAtOutputs,
    NetworkOperator,
    check_product,
    loss_scale,
)
from laplace_debias.curvature.operators.tracing import Tensors
from laplace_debias.curvature.operators.zero_norms import has_norms
from laplace_debias.system.ranks import Ranks, collective

# The minimum number of entries that processes compare if a vector is longer. The actual number is
# up to twice as large.
_SAMPLE_SIZE = 1024


class CurvatureOperator(NetworkOperator):
    r"""A symmetric curvature matrix `[D, D]` of the loss on a data set.

    The loss is torch's loss on the data as *one* batch, however the data are batched: with
    `reduction="sum"`, the sum over all batches; with `"mean"`, this sum divided by torch's divisor,
    which takes weights and ignored targets into account. In a process group, the loss is over the
    data of all processes. Each process has the batches of its shard (`ShardedBatches`), and all
    processes must compute the same products in the same order.

    Args:
        model: The network, in eval mode if it has dropout or batch normalisation. It is never
            changed. Products use the model's parameters at the time of the product: if they have
            been changed in place (for example by an optimiser step), the network is linearised
            again.
        loss: `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss`, with any of their
            arguments, or any callable `loss(outputs, targets) -> scalar` on a batch that torch can
            differentiate twice.
        data: Batches `(inputs, targets)` or `(inputs, targets, weights)`, which must be the same in
            every pass. An example of weight w counts as w examples, including in the divisor of
            `"mean"`; a callable must then be a sum or a mean over examples. The data are read for
            every product, unless all linearisations are kept. Inputs are a tensor, `model(x)`, a
            tuple or list of tensors, `model(*x)`, or a mapping, `model(**x)`. Batches may also be
            mappings or dataclasses that contain the targets, such as the batches of collators.
        params: `"all"` (also None), `"weights"`, `"last_layer"`, names, or a predicate
            `(name, parameter) -> bool`. Frozen parameters are never included; tied parameters count
            as one.
        num_data: The number of examples, or None if it is not known. An error is raised if the data
            contain a different number of examples.
        reduction: `"mean"` or `"sum"` over examples, for a callable without an attribute
            `reduction`.
        memory_bound: The largest number of bytes of the linearised batches that are kept between
            products. Batches that do not fit are linearised again in every product, one at a time.
        chunk_size: The number of columns of a matrix that are multiplied at once. Pass 1 for a
            network with operations that `torch.vmap` does not support. Default: as many columns as
            make products faster.
        batch: A function from an item of the data to `(inputs, targets)`, for batches of a
            different form.

    Raises:
        ValueError: If the model's outputs are random, the model contains or returns NaN, the data
            are empty or differ between passes, or the targets do not match the loss. Errors that
            the first pass can detect are raised before any product.
        TypeError: If the data are an iterator that can be read only once, or inputs, targets or the
            loss have the wrong type.
        RuntimeError: If autocast is enabled, even if only during a product.
    """

    @collective("a curvature operator's construction")
    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Batches,
        params: ParameterSelection | None = None,
        num_data: int | None = None,
        *,
        reduction: str | None = None,
        memory_bound: int = LINEARISATION_BYTES,
        chunk_size: int | None = None,
        batch: BatchHook | None = None,
    ) -> None:
        super().__init__(
            model,
            data,
            params,
            num_data,
            memory_bound=memory_bound,
            chunk_size=chunk_size,
            batch=batch,
        )
        takes_vectors = self._network.returns_vector(self._data.first().inputs)
        self._loss = output_loss(loss, reduction, takes_vectors)
        self._scale = loss_scale(self._loss, self._data, self._first_outputs)
        with torch.no_grad():
            labels = self._loss.labels(self._data.first().targets, self._first_outputs.ndim)
            value = self._loss.value(self._first_outputs, labels)
        parameters = self._network.user_parameters
        check_depends_on_outputs_only(self._loss, parameters, self._first_outputs, labels)
        if not value.isfinite():
            raise ValueError(
                f"The loss is {float(value)} on the first batch. Check the targets and the scale "
                "of the outputs."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """`(D, D)`, where D is the number of selected parameters."""
        return self._network.num_parameters, self._network.num_parameters

    is_symmetric = True

    @property
    def T(self) -> "CurvatureOperator":  # noqa: N802
        """The operator itself, because it is symmetric."""
        return self

    def _check_batch(self, outputs: Tensor, targets: Tensor) -> None:
        self._loss.check(outputs, targets)

    def _weighted_labels(self, batch: Batch) -> Labels:
        """Return the labels of a batch, including the weights of the examples."""
        labels = self._loss.labels(batch.targets, self._first_outputs.ndim)
        return replace(labels, example_weights=batch.weights)

    @collective("a curvature operator's product")
    @torch.inference_mode(False)
    def _product(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        vectors = matrix.T.contiguous()
        _require_same_vectors(vectors, self._ranks)

        def product(item: Item) -> Tensor:
            """Compute the products of one batch, `[k, D]`, without the scale of the loss."""
            products = []
            for chunk in self._chunks(item, len(vectors)):
                tangents = vectors[chunk]
                batched = len(tangents) > 1
                tensors = self._network.split(tangents if batched else tangents[0])
                product_tensors = self._apply(item, tensors, batched)
                flat_product = self._network.join(product_tensors, batched)
                products.append(flat_product.view(tangents.shape))
            return torch.cat(products)

        # The data has at least one batch, so the sum needs no start value.
        total = reduce(Tensor.add_, self._map_items(product))
        self._ranks.sum([total])
        check_product(self, vectors, total)
        return total.mul_(self._scale).T

    def _apply(self, item: Item, tensors: list[Tensor], batched: bool) -> Tensors:
        """Apply Jᵀ M J, where M is the linear map at the outputs."""
        assert item.at_outputs is not None
        (tangent,) = item.linearisation.jacobian(tensors, batched=batched)
        return item.linearisation.adjoint((item.at_outputs(tangent),), batched=batched)


class Hessian(CurvatureOperator):
    r"""The Hessian $\nabla^2_\theta L$ of the loss with respect to the parameters.

    A product is a forward derivative of the gradient. See `CurvatureOperator` for the arguments.

    Raises:
        ValueError: If the loss depends on a norm or a distance that is 0. It has no second
            derivative there, and torch returns a wrong value. The error is raised in the first
            product. Also raises the errors of `CurvatureOperator`.

    Reference:
        Pearlmutter (1994), "Fast exact multiplication by the Hessian".
    """

    _may_have_norms = True

    def _linearise(self, batch: Batch) -> Linearisation:
        labels = self._weighted_labels(batch)
        if self._may_have_norms and batch.number not in self._checked:
            self._may_have_norms = has_norms(self._network, self._loss, batch.inputs, labels)
        return self._lineariser.second_order(self._loss, batch.inputs, labels)

    def _apply(self, item: Item, tensors: list[Tensor], batched: bool) -> Tensors:
        return item.linearisation.hessian(tensors, batched=batched)


class GGN(CurvatureOperator):
    r"""The generalised Gauss-Newton matrix $\sum_n J_n^\top\nabla^2_f \ell_n J_n$.

    $J_n$ is the Jacobian of the outputs with respect to the parameters, and $\ell_n$ is the part of
    the loss that example n contributes; with `reduction="mean"`, the sum is divided in the same way
    as the loss. The GGN is the Hessian without the curvature of the network itself. It is positive
    semi-definite for a loss that is convex in the outputs. See `CurvatureOperator` for the
    arguments.

    Reference:
        Schraudolph (2002), "Fast curvature matrix-vector products for second-order gradient
        descent".
    """

    @property
    def is_positive_semidefinite(self) -> bool:
        """True if the loss is known to be convex in the outputs."""
        return self._loss.is_convex

    def _at_outputs(self, outputs: Tensor, batch: Batch) -> MapAtOutputs:
        hessian = self._loss.weighted_hessian(outputs, self._weighted_labels(batch))
        return MapAtOutputs(hessian, num_tensors=2)


class Fisher(CurvatureOperator):
    r"""The Fisher information matrix, for labels drawn from the model's distribution.

    $$F = \frac1c \sum_n \omega_n\, \mathbb{E}_{y \sim p(y \mid f_n)}
    [\nabla_\theta \ell(f_n, y)\,\nabla_\theta \ell(f_n, y)^\top]$$

    Here $\ell = -\log p$, where p is the softmax for `nn.CrossEntropyLoss`, independent Bernoullis
    for `nn.BCEWithLogitsLoss`, and a Gaussian of variance ½ for `nn.MSELoss` (so that
    $\ell = (f - y)^2$). Outputs at several positions are independent given the network. $c$ is the
    divisor of the loss's reduction.

    The arguments of the loss weight its terms, and do not change the distribution of the model. The
    weight $\omega$ of a term is its weight in the loss: `weight` of its target's class,
    `pos_weight`, zero if the term is ignored, and with label smoothing the mean weight under the
    smoothed target. Therefore `"exact"` equals the `GGN` whatever the arguments of the loss, and
    `"mc"` and `"signs"` are unbiased estimates of it.

    See `CurvatureOperator` for the arguments that are not listed here.

    Args:
        fisher: `"exact"` (type II): the expectation in closed form. `"mc"` (type I): the mean over
            drawn labels. `"signs"`: sums of the columns of the loss Hessian's root with random
            signs. Such sums are exact for one output per example, and have less noise than `"mc"`
            for a confident network.
        mc_samples: For `"mc"` and `"signs"`: the number of labels or sums per example. Default: 1.
        generator: For `"mc"` and `"signs"`: the generator of the labels or signs. The draws depend
            on the generator and on the example's index in the data, and are the same in every
            product. torch's global generator is then not used, not even by the loader.

    Raises:
        ValueError: If the kind is unknown, or arguments of `"mc"` and `"signs"` are passed with
            `"exact"`.
        TypeError: If the loss is not `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss`.

    Reference:
        Kunstner, Balles & Hennig (2019), "Limitations of the empirical Fisher approximation".
        Martens, Sutskever & Swersky (2012), "Estimating the Hessian by back-propagating
        curvature", for the signs.
    """

    is_positive_semidefinite = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Batches,
        params: ParameterSelection | None = None,
        num_data: int | None = None,
        *,
        fisher: str = "exact",
        mc_samples: int | None = None,
        generator: torch.Generator | None = None,
        reduction: str | None = None,
        memory_bound: int = LINEARISATION_BYTES,
        chunk_size: int | None = None,
        batch: BatchHook | None = None,
    ) -> None:
        if fisher not in ("exact", "mc", "signs"):
            raise ValueError(
                f'Unknown `fisher={fisher!r}`. Use "exact", "mc" or "signs". For the empirical '
                "Fisher, use `EmpiricalFisher`."
            )
        if fisher == "exact" and (mc_samples is not None or generator is not None):
            raise ValueError(
                '`mc_samples` and `generator` apply only to `fisher="mc"` and `"signs"`, got '
                '`fisher="exact"`. Remove them.'
            )
        columns = FisherType(fisher, 1 if mc_samples is None else mc_samples)
        self._generator = generator
        super().__init__(
            model,
            loss,
            data,
            params,
            num_data=num_data,
            reduction=reduction,
            memory_bound=memory_bound,
            chunk_size=chunk_size,
            batch=batch,
        )
        if not self._loss.has_distribution:
            raise TypeError(
                "The Fisher matrix is defined by a distribution of the labels. Only "
                "nn.CrossEntropyLoss, nn.MSELoss and nn.BCEWithLogitsLoss define such a "
                "distribution. For a different loss, use `GGN` or `EmpiricalFisher`."
            )
        with collective("a curvature operator's construction"):
            columns = columns.seeded(generator, self._ranks)
        self._cotangents = Cotangents(self._loss, columns)

    def _at_outputs(self, outputs: Tensor, batch: Batch) -> MapAtOutputs:
        fisher = self._cotangents.fisher
        if fisher.kind == "exact":
            hessian = self._loss.weighted_hessian(outputs, self._weighted_labels(batch))
            return MapAtOutputs(hessian, num_tensors=2)
        vectors = self._cotangents(outputs, batch.targets, batch.first_index).columns
        return MapAtOutputs(_outer_products(vectors, batch.weights), fisher.mc_samples)


class EmpiricalFisher(CurvatureOperator):
    r"""The empirical Fisher: the sum of outer products of gradients at the true labels.

    $$\frac1c \sum_n g_n g_n^\top, \quad g_n =\nabla_\theta \ell_n$$

    Here $\ell_n$ is the example's part of the loss with `reduction="sum"`, summed over the
    positions of the example. It includes all arguments of the loss, so weights enter squared. $c$
    is the divisor of the loss's reduction: 1 for `"sum"`; for `"mean"`, the number of examples for
    unweighted cross-entropy, and the number of output entries for `nn.MSELoss`. Without weights,
    the expectation of this matrix over labels drawn from the model is the `Fisher`. The loss must
    be a sum or a mean over examples.

    See `CurvatureOperator` for the arguments.

    Reference:
        Kunstner, Balles & Hennig (2019), "Limitations of the empirical Fisher approximation", on
        why the empirical Fisher is neither the Fisher nor the Hessian.
    """

    is_positive_semidefinite = True

    def _at_outputs(self, outputs: Tensor, batch: Batch) -> MapAtOutputs:
        labels = self._loss.labels(batch.targets, outputs.ndim)
        gradients = self._loss.gradient(outputs, labels).unsqueeze(0)
        return MapAtOutputs(_outer_products(gradients, batch.weights), num_tensors=1)


def _require_same_vectors(vectors: Float[Tensor, "k columns"], ranks: Ranks) -> None:
    """Require that all ranks multiply the same vectors, up to differences in rounding.

    A sample of the entries is compared.
    """
    if ranks.size == 1:
        return
    sample = vectors.flatten()[:: max(1, vectors.numel() // _SAMPLE_SIZE)].double().cpu()
    by_rank = ranks.exchange((tuple(vectors.T.shape), sample))
    shape, first_sample = by_rank[0]
    tolerance = 1e-3 * float(first_sample.abs().max())
    for rank, (other_shape, other_sample) in enumerate(by_rank):
        if other_shape != shape:
            difference = f"one of shape {list(other_shape)}, and rank 0 one of shape {list(shape)}"
        elif not torch.allclose(other_sample, first_sample, rtol=0, atol=tolerance, equal_nan=True):
            difference = "one with other entries than rank 0"
        else:
            continue
        raise ValueError(
            "The vector that the operator multiplies differs between the ranks: rank "
            f"{rank} has {difference}. Pass the same vectors on every rank. For "
            "generators, use the same seed."
        )


def _outer_products(
    gradients: Float[Tensor, "samples *outputs"], weights: Float[Tensor, " batch"] | None
) -> OutputMap:
    """Return the map from v to w Σ_s g_s (g_sᵀ v), example by example."""
    if weights is not None:
        gradients = scale_examples(gradients, weights.to(gradients.dtype).sqrt(), 1)
    rows = gradients.flatten(2) if gradients.ndim > 2 else gradients.unsqueeze(2)

    def product(v: Tensor) -> Tensor:
        vectors = v.reshape(-1, *rows.shape[1:])
        coefficients = torch.einsum("sbo,kbo->ksb", rows, vectors)
        return torch.einsum("ksb,sbo->kbo", coefficients, rows).reshape(v.shape)

    return product
