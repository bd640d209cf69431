"""Calls on a posterior whose blocks several processes share out: all of them make each together.

Each process calculates what its blocks give for the same examples, and one sum gives the result to
all.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from laplace_debias.curvature.fits.sharded_blocks import ShardedBlocks
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.gathered import gathered
from laplace_debias.curvature.network.inputs import Inputs, move, tensors_of
from laplace_debias.curvature.network.same_vectors import digest
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.same_arguments import check_same, described_call, options_of
from laplace_debias.system.ranks import current, together

P = ParamSpec("P")
Result = TypeVar("Result")


def collective(
    *, always: bool = False, with_model: bool = True
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """A method that the processes of a group call together; it goes by its name in messages.

    Before the work they compare its arguments, and where all call it what its object was made with.

    Its object has a `model`, which is whole meanwhile if `fully_shard` has split it, and
    `_posteriors`, none before a fit.

    Args:
        always: Whether all call it even if the posterior is whole, as what reads data or writes.
        with_model: Whether it computes with the model. If not, and the posterior is whole, each
            process may call it alone.
    """

    def decorate(method: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(method)
        def called(*args: P.args, **kwargs: P.kwargs) -> Result:
            of: Any = args[0]
            whole = gathered(of.model) if with_model else nullcontext()
            what, said = method.__name__, partial(described_call, method, args, kwargs)
            with (
                whole,
                together(what) if always else together_if_sharded(what, of._posteriors, said),
            ):
                if always and (ranks := current()).size > 1:
                    check_same(what, ranks.exchange(said() | options_of(of)))
                return method(*args, **kwargs)

        return called

    return decorate


@contextmanager
def together_if_sharded(
    what: str,
    posteriors: Sequence[GaussianPosterior],
    described: Callable[[], dict[str, Any]] = dict,
) -> Iterator[None]:
    """What all processes do if some posterior is sharded, else this one alone.

    Args:
        what: What messages call it.
        posteriors: What it works on.
        described: Its arguments that must be the same, as `check_same` takes them.

    Raises:
        RuntimeError: If this call is not one of all processes that share the blocks.
        ValueError: As `sharded_among`, `check_same` and `check_same_state`.
    """
    sharded = sharded_among(posteriors)
    if sharded is None:
        yield
        return
    sharded.ranks()
    with together(what):
        said = current().exchange([described(), states_of(posteriors)])
        check_same(what, [arguments for arguments, _ in said])
        check_same_state([states for _, states in said])
        yield


def sharded_among(posteriors: Sequence[GaussianPosterior]) -> ShardedBlocks | None:
    """The curvature of the first sharded one of some posteriors, if there is one.

    Raises:
        ValueError: If there are several whose blocks are shared out in different ways.
    """
    found = [p.curvature for p in posteriors if isinstance(p.curvature, ShardedBlocks)]
    if any(of.owners != found[0].owners for of in found):
        raise ValueError(
            "The posteriors' blocks are shared out in different ways: make them whole by "
            "`la.gather()`, or predict with each."
        )
    return found[0] if found else None


def states_of(posteriors: Sequence[GaussianPosterior]) -> list[Any]:
    """Prior, temperature and N of some posteriors, as plain data."""
    return [[p.prior_precision.tolist(), p.temperature, p.num_data] for p in posteriors]


def check_same_state(of_ranks: Sequence[list[Any]]) -> None:
    """Require the same prior and temperature on all processes.

    Args:
        of_ranks: What `states_of` gave on each.

    Raises:
        ValueError: Otherwise.
    """
    for rank, of_rank in enumerate(of_ranks):
        if of_rank != of_ranks[0]:
            raise ValueError(
                f"Rank {rank} has another prior precision, temperature or N than rank 0: set them "
                "to the same on all ranks, whose blocks make one posterior."
            )


@dataclass(frozen=True)
class Share:
    """What this process does of a call: all blocks, or of sharded posteriors those it holds.

    Attributes:
        blocks: The blocks.
        at: Their numbers among all.
        sharded: How they are shared out; None if they are not.
    """

    blocks: Sequence[Block]
    at: slice | list[int]
    sharded: ShardedBlocks | None

    @classmethod
    def of(cls, posteriors: Sequence[GaussianPosterior], blocks: Sequence[Block]) -> "Share":
        """That of a call on some posteriors; of a whole one among sharded ones the same blocks.

        Args:
            posteriors: Posteriors over the blocks.
            blocks: All blocks.

        Raises:
            ValueError: As `sharded_among`.
        """
        sharded = sharded_among(posteriors)
        if sharded is None:
            return cls(blocks, slice(None), None)
        at = [index for index, block in enumerate(blocks) if sharded.is_here(block.name)]
        return cls([blocks[index] for index in at], at, sharded)

    def check_same(self, x: Inputs, others: Sequence[Tensor | None], diagonal: bool) -> None:
        """Require all processes to ask for the same.

        Args:
            x: Inputs.
            others: Prior precisions, and which outputs.
            diagonal: Whether variances will do.

        Raises:
            ValueError: Otherwise.
        """
        if self.sharded is None:
            return
        asked = [None if of is None else digest(of) for of in (*tensors_of(x), *others)]
        if wrong := self.sharded.ranks().unlike_first([asked, diagonal]):
            raise ValueError(
                f"Ranks {wrong} ask for other inputs, outputs or prior precisions than rank 0, but "
                "a sharded posterior predicts for the same on all ranks: pass the same, or make "
                "it whole by `la.gather()`, after which each rank predicts by itself."
            )

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place; of whole posteriors as it is."""
        return tensor if self.sharded is None else self.sharded.summed(tensor)


def predicted(
    batches: Pairs, predict: Callable[[Inputs], Result], in_turn: bool
) -> Iterator[tuple[Result, Tensor]]:
    """What is predicted of each batch of this process, with the batch's targets.

    Args:
        batches: This process's batches.
        predict: What predicts.
        in_turn: Whether all processes predict for the batches of each, one after the other.
    """
    if not in_turn:
        for x, y in batches:
            yield predict(x), y
        return
    ranks, iterator = current(), iter(batches)
    while True:
        batch = next(iterator, None)
        has_one = ranks.exchange(batch is not None)
        if not any(has_one):
            return
        own: list[Result] = []
        for rank in (rank for rank, has in enumerate(has_one) if has):
            is_own = batch is not None and rank == ranks.rank
            sent: Any = move(batch[0], torch.device("cpu"), None) if batch and is_own else None
            x = ranks.from_rank(sent, rank)
            found = predict(batch[0] if batch and is_own else x)
            if is_own:
                own = [found]
        if batch is not None:
            yield own[0], batch[1]
