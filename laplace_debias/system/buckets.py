"""Tensors in few messages: joined up to a size, of symmetric matrices the upper triangle."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# A message takes as long as its bytes from about a megabyte on; a copy of a bucket is made.
_BUCKET_BYTES = 2**26


def buckets(
    tensors: Sequence[Tensor], size: Callable[[Tensor], int] = Tensor.numel
) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to a number of bytes.

    Args:
        tensors: Any.
        size: How many numbers of one travel.
    """
    bucket: list[Tensor] = []
    num_bytes = 0
    for x in tensors:
        more = size(x) * x.element_size()
        is_alike = bool(bucket) and (x.dtype, x.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not is_alike or num_bytes + more > _BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(x)
        num_bytes += more
    if bucket:
        yield bucket


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of tensors, one after the other, flat."""
    return torch.cat([x.reshape(-1) for x in tensors])


def upper_sizes(tensor: Tensor) -> int:
    """How many numbers `upper` gives."""
    if tensor.ndim < 2:
        return tensor.numel()
    d = tensor.shape[-1]
    return tensor[..., 0, 0].numel() * (d * (d + 1) // 2)


def upper(tensor: Tensor) -> Tensor:
    """The upper triangles of symmetric matrices `[..., d, d]`, flat; a vector as it is."""
    return tensor if tensor.ndim < 2 else tensor[..., _is_upper(tensor)].reshape(-1)


def lower_filled(flat: Tensor, like: Tensor) -> Tensor:
    """The symmetric matrices whose upper triangles `upper` gave.

    Args:
        flat: The upper triangles.
        like: Gives the shape.
    """
    if like.ndim < 2:
        return flat.clone()
    full = torch.zeros_like(like)
    full[..., _is_upper(like)] = flat.view(*like.shape[:-2], -1)
    return full + full.triu(1).mT


def _is_upper(tensor: Tensor) -> Tensor:
    d = tensor.shape[-1]
    return torch.ones(d, d, dtype=torch.bool, device=tensor.device).triu()
