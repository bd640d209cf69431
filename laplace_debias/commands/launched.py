"""Which of several processes this is: what `torchrun`, or a scheduler, says in the environment."""

from collections.abc import Mapping
from dataclasses import dataclass

_RENDEZVOUS = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_START = "start all processes with torchrun, or unset WORLD_SIZE to run one process alone"


@dataclass(frozen=True)
class Launched:
    """One of several processes that share a command's work.

    Attributes:
        rank: Which one this is.
        size: How many there are.
        local_rank: Which one it is on its machine; None if nobody says.
        is_torchrun: Whether `torchrun` started it, which stops all if one ends badly.
    """

    rank: int
    size: int
    local_rank: int | None
    is_torchrun: bool


def launched_by(environment: Mapping[str, str]) -> Launched | None:
    """What `RANK`, `WORLD_SIZE` and so on say; None for a process on its own.

    Args:
        environment: The variables of the process.

    Raises:
        ValueError: If they contradict each other, or the others cannot be found by them.
    """
    size = _number(environment, "WORLD_SIZE")
    if size is None or size == 1:
        return None
    missing = [name for name in _RENDEZVOUS if not environment.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {size} in the environment, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so the processes cannot find each "
            f"other: {_START}"
        )
    rank, _ = _number(environment, "RANK"), _number(environment, "MASTER_PORT")
    assert rank is not None
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE {size} in the environment: {_START}")
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    return Launched(rank, size, _number(environment, "LOCAL_RANK"), is_torchrun)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{name} is {text!r} in the environment; expected a whole number: {_START}"
        ) from None
