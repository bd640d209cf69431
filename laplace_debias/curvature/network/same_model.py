"""Several processes differentiate one network: its tensors are the same on all of them."""

import hashlib
import json

from torch import nn

from laplace_debias.curvature.network.fingerprint import changed, fingerprint
from laplace_debias.system.ranks import Ranks


def check_same_model(ranks: Ranks, model: nn.Module) -> None:
    """Require the same parameters and buffers on all processes.

    Args:
        ranks: The processes.
        model: The model, without wrappers.

    Raises:
        ValueError: If they differ.
    """
    if ranks.size == 1:
        return
    tensors = fingerprint(model, ())
    digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
    digests = ranks.exchange(digest)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            of_ranks = ranks.exchange(tensors)
            name = changed(of_ranks[0], of_ranks[rank])[0]
            raise ValueError(
                f"The model of rank {rank} is not that of rank 0: {name} differs. Load one "
                "checkpoint on all ranks, or send rank 0's state to the others "
                "(`torch.distributed.broadcast`); a DistributedDataParallel model's statistics of "
                "batch normalisation differ after training."
            )
