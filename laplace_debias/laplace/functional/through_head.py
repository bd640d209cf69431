r"""Mean and covariance of outputs that a linear head gives, by way of its inputs.

With $f_{tc} = w_c^\top h_t + b_c$, parameters below the head act on the outputs through $h$
`[B, p, d]` alone. So no cotangent of size T·C is pushed back: for k outputs those of $h$ are the
rows $w_c$; where these are more than $p \cdot d$, the covariance $\Sigma_h$ is computed, and
$w_c^\top \Sigma_h w_{c'}$ of it. The head's own parameters have the Jacobian rows
$e_c \otimes h_t$.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.chosen_positions import LinearCalls
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.laplace.functional.blocks import BlockMoments
from laplace_debias.laplace.functional.head_products import (
    Wanted,
    contracted,
    head_products,
)
from laplace_debias.laplace.functional.moments import (
    SHARE,
    OutputRequest,
    check_size,
    columns_at_once,
    finished,
)
from laplace_debias.laplace.posterior import GaussianPosterior


def can_go_through(head: str, blocks: Sequence[Block], posterior: GaussianPosterior) -> bool:
    """Whether all parameters are the head's, or act on the outputs through what goes into it.

    A weight that the head shares with an embedding does both, and does not go this way.

    Args:
        head: Path of the linear layer that gives the outputs.
        blocks: The blocks of the parameters.
        posterior: A posterior over them.
    """
    # Calls that are run once more give what comes behind the head.
    paths = [path for block in blocks for path in block.calls]
    is_behind = any(not path or path == head or head.startswith(f"{path}.") for path in paths)
    return DENSE_BLOCK not in posterior.curvature.blocks and not is_behind


def moments_through_head(
    network: nn.Module,
    head: str,
    blocks: Sequence[Block],
    posterior: GaussianPosterior,
    x: Inputs,
    prior_precisions: Float[Tensor, "grid blocks"],
    request: OutputRequest,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    """As `functional_moments`, for parameters that `can_go_through` a head.

    Args:
        network: A `shadow` of the trained network, with outputs `[B, p, C]`.
        head: Path of the linear layer that gives them.
        blocks: This and all else as `functional_moments` takes it.
        posterior: As there.
        x: As there.
        prior_precisions: As there.
        request: As there.

    Raises:
        ValueError: As `functional_moments`.
    """
    calls, tap = LinearCalls(network, head), Tap(network, blocks)
    weight = network.get_parameter(f"{head}.weight".lstrip(".")).detach()
    in_head = [i for i, block in enumerate(blocks) if block.layer == head]
    below = [block for i, block in enumerate(blocks) if i not in in_head]
    without = blocks[in_head[0]].site if in_head else None

    def add_below(total: Tensor, wanted: Wanted) -> int:
        """Add what parameters below the head do, and say how many examples to take next."""
        of_h = replace(request, diagonal=request.diagonal and not wanted.by_inputs)
        num_columns = wanted.h[0].numel() if wanted.by_inputs else wanted.num_outputs
        gradients, remedy = tap.output_bytes(), ", or ask for fewer outputs"
        at_once, bound = columns_at_once(of_h, num_columns, gradients, below, wanted.h, remedy)
        moments = BlockMoments(blocks, posterior, prior_precisions, of_h.diagonal)
        for begin in range(0, num_columns, at_once):
            some = slice(begin, min(begin + at_once, num_columns))
            size = [some.stop - begin] * (1 if of_h.diagonal else 2)
            found = total.new_zeros(*total.shape[:2], *size)
            moments.begin(found)
            columns, more = wanted.columns(some), some.stop < num_columns
            for site, uses in tap.backward(calls.x, columns, again=more, without=without):
                for index, block in enumerate(blocks):
                    if block.site == site:
                        moments.add(index, tap.layers[site], uses)
            # Without the diagonal alone all columns are one part.
            outputs = wanted.of_columns(some) if of_h.diagonal else wanted
            into = total[..., some] if of_h.diagonal else total
            into += contracted(found, outputs, request.diagonal)
        return max(1, bound // (SHARE * gradients * at_once))

    means, covariances = [], []
    start, chunk = 0, 1  # The first example shows how much memory one takes.
    while start < num_examples(x):
        part = slice(start, start + chunk)
        outputs = tap.forward(take(x, part))
        check_outputs(outputs, num_examples(x) if chunk == 1 else None)
        chosen = None if request.outputs is None else request.outputs[part]
        check_size(outputs, chosen, request, free_positions=1)
        flat = outputs.detach().flatten(1)
        means.append(flat if chosen is None else flat.gather(1, chosen))
        wanted = Wanted.of(weight, calls.x, chosen)
        size = [wanted.num_outputs] * (1 if request.diagonal else 2)
        total = flat.new_zeros(len(prior_precisions), len(flat), *size)
        start += len(flat)
        if calls.x.requires_grad:
            chunk = add_below(total, wanted)
        tap.forget()
        for index in in_head:
            deltas = prior_precisions[:, index]
            total += head_products(blocks[index], posterior, deltas, wanted, request.diagonal)
        covariances.append(total)
    shape = outputs.shape[1:] if request.outputs is None else None
    return finished(means, covariances, prior_precisions, shape, request.diagonal)
