"""A product of several processes is one product: all of them multiply the same vector."""

from torch import Tensor

from laplace_debias.curvature.network.fingerprint import mark_in_order
from laplace_debias.system.ranks import Ranks


def check_same(ranks: Ranks, vectors: Tensor) -> None:
    """Require all processes to multiply the same vectors, to the last bit.

    Args:
        ranks: The processes.
        vectors: What this one multiplies.

    Raises:
        ValueError: If they differ.
    """
    if ranks.size == 1:
        return
    if wrong := ranks.unlike_first([list(vectors.shape), digest(vectors)]):
        raise ValueError(
            f"Ranks {wrong} multiply another vector than rank 0. All ranks make the same products: "
            "pass generators of one seed, generator=torch.Generator().manual_seed(0) on each, to "
            "what draws vectors (trace, eigsh, ...), or send rank 0's vector to the others."
        )


def digest(tensor: Tensor) -> int:
    """A number that changes with any bit of a tensor's entries, and with their order."""
    return int(mark_in_order(tensor.flatten()))
