"""How much memory a computation holds at once, in tensors that it makes."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TrackedMemory(TorchDispatchMode):
    """Counts bytes of the tensors that are made within, on any device.

    What an operation uses for itself and gives back is not seen.

    Attributes:
        live: Bytes held now.
        peak: Most bytes held at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count what it made."""
        for given in tree_leaves((args, kwargs)):
            self._know(given, 0)
        made = func(*args, **(kwargs or {}))
        for new in tree_leaves(made):
            self._know(new, 1)
        self.peak = max(self.peak, self.live)
        return made

    def _know(self, value: Any, counts: int) -> None:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return
        storage = value.untyped_storage()
        key, size = id(storage), counts * storage.nbytes()
        if key in self._known:
            return

        def free(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, free)
        self.live += size
