"""K-FAC and EKFAC of a torch loss as linear operators in the model's parameter order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar

import torch
from torch import nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.data.repeatable_data import RepeatableBatches
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layers.backends import make_backend
from laplace_debias.curvature.layers.blocks import Block, Sharing, parameter_order
from laplace_debias.curvature.layers.resolve import resolve
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses import Loss, OutputLoss, output_loss
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.torch_losses import check_depends_on_outputs_only
from laplace_debias.curvature.network.fingerprints import checksum
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.network.shared_copy import refuse_calls
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.curvature.operators.network import Network
from laplace_debias.curvature.operators.network_operator import loss_scale
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.curvature.structures.ekfac import EkfacCurvature
from laplace_debias.curvature.structures.kfac import KfacCurvature
from laplace_debias.operators import BlockDiagonal, EigenKronecker, Permuted
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import collective, process_group


@dataclass(eq=False, repr=False, init=False)
class KFAC(Permuted):
    r"""The Kronecker-factored approximation of the `GGN` of a loss, `[D, D]`.

    There is one block per parameter, with curvatures $\Lambda$ along an eigenbasis that is a
    Kronecker product, $U_G \otimes U_A$. The operator is symmetric, positive semi-definite and in
    the model's parameter order, and it stores its eigendecomposition. Therefore `inverse`, `eigsh`,
    `logdet`, `trace` and roots, including those of `KFAC(...) + c * Identity(D)`, are exact and
    need no pass over the data.

    The loss is torch's loss on the data as *one* batch, as for `GGN`. Every argument of
    `nn.CrossEntropyLoss`, `nn.MSELoss` and `nn.BCEWithLogitsLoss` weights the cotangents at the
    outputs as it weights the loss, and $c$ is the divisor of the loss's reduction. Let the factors
    over N examples be $G = \frac1{NT}\sum g g^\top$ of the summed loss and
    $A = \frac1N\sum a a^\top$. Here T is the number of positions of an example that share the
    weight, not counting ignored and padded positions, and $\sum$ is over examples, positions and
    cotangents. A block is then $\frac Nc\, G \otimes A$. A is the mean over the examples that have
    a position in the layer. If the loss weights its terms, it is the weighted mean, in which each
    example has the mean weight of its terms. The block of a bias or a scale is exact, and so is the
    block of any parameter without a Kronecker form, such as a weight that two layers share. The
    exact block of a parameter with d entries needs d² memory.

    K-FAC equals the `GGN` where a Kronecker product is exact: for one example, and for the blocks
    of a linear network of any depth with `nn.MSELoss`.

    Args:
        model: The network, in eval mode if it has dropout or batch normalisation. It is never
            changed.
        loss: `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss`, with any of their
            arguments; with `fisher="empirical"` also a callable `loss(outputs, targets) -> scalar`
            on a batch.
        data: Re-iterable batches `(inputs, targets)` or `(inputs, targets, weights)`; see
            `CurvatureOperator`. These batches determine the directions, and also the magnitudes
            unless `magnitudes` is passed.
        params: The parameters; see `CurvatureOperator`.
        num_data: The number of examples, or None if it is not known. An error is raised if the data
            contain a different number of examples.
        magnitudes: Other batches on which the curvature along the directions is measured. This
            removes the bias of measuring the curvature on the data that chose the directions (Eq.
            9). The operator is then for the loss on *these* batches.
        fisher: `"exact"`: the loss Hessian in closed form. `"mc"`: gradients at drawn labels.
            `"signs"`: sums of the columns of the Hessian's root with random signs. `"empirical"`:
            gradients at the true labels, which approximates `EmpiricalFisher`.
        mc_samples: For `"mc"` and `"signs"`: the number of labels or sums per example. Default: 1.
        generator: For `"mc"` and `"signs"`: the generator of the labels or signs. The draws of an
            example depend on the generator and on the example's index in the data. torch's
            global generator is then not used, not even by loaders.
        reduction: `"mean"` or `"sum"` over examples, for a callable without an attribute
            `reduction`.
        joint: Whether to treat the weight and the bias of a layer as one block instead of two.
        sharing: How to treat weights that are applied at several positions of a convolution or a
            sequence: `"expand"` or `"reduce"`, or a mapping from layers' paths to these.
        backend: `"backpack"`, `"hooks"`, or `"auto"`. All backends give the same factors.
        factor_dtype: The dtype in which factors are summed and decomposed.
        memory_bound: The limit on the working memory for output gradients, in bytes. It does not
            affect results. Default: 128 MiB (2 GiB on a GPU), or up to 4 GiB if a single example
            needs more.
        batch: A function from an item of the data to `(inputs, targets)`, also for `magnitudes`.

    Attributes:
        operator: The blocks, one after the other; `operator.blocks[name]` is an `EigenKronecker`.
        order: For each row of the blocks, its index among the parameters; None if both orders are
            the same.
        layout: The parameters' names and shapes.
        num_data: N, the number of examples that the magnitudes come from.

    Raises:
        ValueError: If the model's outputs are random, the model contains NaN, the data are empty or
            differ between passes, the targets do not match the loss, or a parameter name is
            unknown. Data are checked once before the factors are computed, and compared in later
            passes.
        TypeError: If the data are an iterator that can be read only once, or the loss has no closed
            form and `fisher` is not `"empirical"`.
        NotImplementedError: If the gradients of single examples cannot be computed for a parameter.
            The message names the parameter and a remedy.
        RuntimeError: If autocast is enabled, even if only during a product.

    Reference:
        Martens & Grosse (2015), "Optimizing neural networks with Kronecker-factored approximate
        curvature". Eschenhagen et al. (2023), "Kronecker-factored approximate curvature for modern
        neural network architectures". Tatzel et al. (2025), "Debiasing mini-batch quadratics".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.curvature import KFAC
        >>> from laplace_debias.linalg import inverse
        >>> from laplace_debias.operators import Identity
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> data = [(torch.randn(64, 2), torch.randint(3, (64,)))]
        >>> K = KFAC(model, nn.CrossEntropyLoss(), data)
        >>> gradient = torch.randn(K.shape[0])
        >>> (inverse(K + 0.1 * Identity(K.shape[0])) @ gradient).shape
        torch.Size([51])
    """

    num_data: int = 0

    @collective("K-FAC")
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Batches,
        params: ParameterSelection | None = None,
        num_data: int | None = None,
        *,
        magnitudes: Batches | None = None,
        fisher: str = "exact",
        mc_samples: int | None = None,
        generator: torch.Generator | None = None,
        reduction: str | None = None,
        joint: bool = False,
        sharing: Sharing = "expand",
        backend: str = "auto",
        factor_dtype: torch.dtype = torch.float64,
        memory_bound: int | None = None,
        batch: BatchHook | None = None,
    ) -> None:
        fisher_type = _checked_fisher_type(fisher, mc_samples, generator)
        if factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"`factor_dtype` is {factor_dtype}. Pass torch.float32 or torch.float64."
            )
        if memory_bound is not None:
            whole(memory_bound, "memory_bound")
        network = Network(model, "all" if params is None else params, data, batch)
        tap = Tap(network.working_copy())
        read_data = partial(
            LossData,
            network=network,
            loss=loss,
            reduction=reduction,
            generator=generator,
        )
        factor_data = read_data(data, num_data=num_data)
        magnitude_data = factor_data
        if magnitudes is not None:
            magnitude_data = read_data(magnitudes, num_data=None)
        _check_has_root(fisher, factor_data.loss)
        fisher_type = fisher_type.seeded(generator, process_group())
        with torch.inference_mode(False):
            with refuse_calls(unwrapped(model), network.names, tap.network):
                blocks = _resolved_blocks(
                    tap,
                    network.names,
                    chain(factor_data.data, magnitude_data.data),
                    example_inputs=factor_data.first.inputs,
                    joint=joint,
                    sharing=sharing,
                )
            context = FitContext(
                Cotangents(factor_data.loss, fisher_type),
                blocks,
                make_backend(backend, unwrapped(model), tap, blocks),
                factor_dtype,
                memory_bound=memory_bound,
                ranks=process_group(),
            )
            fitted = self._structure.fit(
                context, factor_data.data, None if magnitudes is None else magnitude_data.data
            )
        order = parameter_order(tap.network, network.names, blocks)
        Permuted.__init__(
            self,
            (magnitude_data.data.total_weight * magnitude_data.scale) * fitted.curvature,
            None if order is None else order.to(network.device),
            network.layout,
        )
        self.num_data = magnitude_data.data.num_examples

    @property
    def blocks(self) -> BlockDiagonal[EigenKronecker]:
        """The blocks of the matrix; their rows are not in the order of the parameters."""
        return self.operator  # type: ignore[return-value]

    _structure: ClassVar[CurvatureStructure] = KfacCurvature()


class EKFAC(KFAC):
    r"""The exact curvature along the eigenvectors of K-FAC, as an operator `[D, D]`.

    $\Lambda_{ij} = \frac1c \sum_n \sum_k ((U_G^\top \sum_t g_{kt} a_t^\top\, U_A)_{ij})^2$, the
    diagonal of the `GGN` in K-FAC's eigenbasis. Its trace therefore equals the trace of the `GGN`
    (on the data of the magnitudes). See `KFAC` for the arguments. EKFAC reads the data twice.

    Reference:
        George et al. (2018), "Fast approximate natural gradient descent in a Kronecker-factored
        eigenbasis".
    """

    _structure = EkfacCurvature()


def _checked_fisher_type(
    fisher: str, mc_samples: int | None, generator: torch.Generator | None
) -> FisherType:
    """Return the type of the Fisher matrix, and refuse options that have no effect on it."""
    fisher_type = FisherType(fisher, 1 if mc_samples is None else mc_samples)
    if not fisher_type.is_random and (mc_samples is not None or generator is not None):
        raise ValueError(
            '`mc_samples` and `generator` apply only to `fisher="mc"` and `"signs"`, got '
            f"`fisher={fisher!r}`. Remove them."
        )
    return fisher_type


def _check_has_root(fisher: str, loss: OutputLoss) -> None:
    """Require a loss whose Hessian has a known root, or the empirical Fisher."""
    if fisher != "empirical" and not loss.has_distribution:
        raise TypeError(
            f'`fisher="{fisher}"` needs nn.CrossEntropyLoss, nn.MSELoss or '
            "nn.BCEWithLogitsLoss, because only for these losses is a square root of "
            "the Hessian known in closed form. For a different loss, use "
            '`fisher="empirical"` or the operator `GGN`.'
        )


def _resolved_blocks(
    tap: Tap,
    names: Sequence[str],
    data: Iterable[Batch],
    *,
    example_inputs: Inputs,
    joint: bool,
    sharing: Sharing,
) -> Sequence[Block]:
    """Find the blocks of parameters, and require that some outputs depend on each of them."""
    resolved = resolve(
        tap,
        names,
        example_inputs,
        joint=joint,
        sharing=sharing,
        more_batches=(batch.inputs for batch in data),
    )
    if resolved.unused:
        raise ValueError(
            f"The outputs do not depend on {resolved.unused} through differentiable "
            "operations. Possible causes are `detach`, `no_grad` or an unused "
            "branch. Exclude these parameters with `params=`."
        )
    return resolved.blocks


class LossData:
    """Batches whose targets have been checked, and the loss with its scale."""

    def __init__(
        self,
        batches: Batches,
        *,
        network: Network,
        loss: Loss,
        reduction: str | None,
        generator: torch.Generator | None,
        num_data: int | None,
    ) -> None:
        ranks = process_group()
        ranks.require_same(model=lambda: checksum(network.working_copy()))
        stream = network.stream(batches, generator, takes_weights=True)
        self.data = RepeatableBatches(stream, network.device, num_data, ranks)
        self.first = self.data.first()
        self.loss = output_loss(loss, reduction, network.returns_vector(self.first.inputs))
        outputs = network.first_outputs(self.first.inputs, self.first.num_examples)
        self.scale = loss_scale(self.loss, self.data, outputs)
        labels = self.loss.labels(self.first.targets, outputs.ndim)
        check_depends_on_outputs_only(self.loss, network.user_parameters, outputs, labels)
