"""Checks of a network's outputs: their values, their shape and their size.

The device computes whether labels are in range and outputs are finite. If the host read each
answer, it would wait for the device in every batch. Therefore, a pass over data collects the
answers on the device and reads them together at the end of the pass or, in a long pass, also in
between. No results are used before the answers have been read. On the CPU, an answer is read
immediately.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.calling import call, logits_of, mixing_error
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.curvature.network.precision import coarsest_eps
from laplace_debias.curvature.network.shared_copy import preserve_attributes
from laplace_debias.system.memory import ROOM, is_out_of_memory, suppress_unsupported
from laplace_debias.system.shown import warn

PASS_BYTES = 2**27
"""The default memory limit on a CPU in bytes."""
LARGEST_DEFAULT_BYTES = 2**32
"""If one example needs more than the default limit, up to this many bytes are used."""
# The largest number of answers that wait to be read. It is limited so that a pass over wrong data
# ends early, and because each answer takes half a kilobyte of the device's memory.
_MOST_KEPT = 1024
_SIGMOID = "SigmoidBackward0"
"""Autograd's name for a sigmoid."""
_RESHAPING = (
    "Alias",
    "Clone",
    "Expand",
    "Permute",
    "Reshape",
    "Select",
    "Slice",
    "Squeeze",
    "ToCopy",
    "Transpose",
    "UnsafeView",
    "Unsqueeze",
    "View",
)
"""Prefixes of autograd's names for operations that change the shape or dtype, but no values."""
_JOINING = ("Cat", "Stack")
"""Prefixes of autograd's names for operations that join several tensors."""
_BEFORE_OUTPUTS = (*_RESHAPING, *_JOINING, "Add")
"""Prefixes of the names of operations that may follow a positive function, such as an addition."""
_POSITIVE = ("ExpBackward0", "SoftplusBackward0")
"""Autograd's names of functions whose values are positive."""
_CURRENT: ContextVar["DeferredChecks | None"] = ContextVar("deferred_checks", default=None)


class _DeferredCheck(NamedTuple):
    """A condition whose value is still on the device, and the error to raise if it is false."""

    is_right: Tensor
    error: Callable[[], Exception]
    batch_number: int | None


@dataclass
class DeferredChecks:
    """Checks of one pass over data whose results are still on the device.

    Example:
        >>> checks = DeferredChecks()
        >>> for number, batch in enumerate([torch.zeros(2), torch.ones(2)], start=1):
        ...     with checks.during_batch(number):
        ...         require((batch < 2).all(), lambda: ValueError("too large"))
        >>> checks.read()
    """

    pending: list[_DeferredCheck] = field(default_factory=list)
    number: int | None = None

    @contextmanager
    def during_batch(self, number: int | None) -> Iterator[None]:
        """Add the number of a batch to the errors that `require` raises within the context."""
        token = _CURRENT.set(self)
        self.number = number
        try:
            yield
        except Exception as error:
            self.read(error)
            raise
        finally:
            _CURRENT.reset(token)
        if len(self.pending) > _MOST_KEPT:
            self.read()

    def read(self, cause: Exception | None = None) -> None:
        """Wait for the results of the checks, and raise the first error."""
        pending = self.pending
        self.pending = []
        if not pending:
            return
        answers = torch.stack([check.is_right for check in pending]).tolist()
        for is_right, check in zip(answers, pending, strict=True):
            if not is_right:
                raise _with_batch_number(check.error(), check.batch_number) from cause


def require(is_right: Tensor | bool, error: Callable[[], Exception]) -> None:
    """Require a condition on tensors, immediately or at the end of a pass.

    The function `error` is kept, so it should refer to a few numbers, not to the batch.
    """
    checks = _CURRENT.get()
    if checks is not None and isinstance(is_right, Tensor) and is_right.device.type != "cpu":
        checks.pending.append(_DeferredCheck(is_right, error, checks.number))
    elif not is_right:  # On the CPU, reading the answer does not wait.
        raise _with_batch_number(error(), None if checks is None else checks.number)


def _with_batch_number(error: Exception, number: int | None) -> Exception:
    if number is None:
        return error
    return type(error)(f"{error} (Batch {number} of the pass over the data.)")


def checked_memory_bound(
    bound: int | None, needed: int, subject: str, device: torch.device, remedy: str = ""
) -> int:
    """Return the number of bytes that may be used, which must be at least `needed`.

    A bound of None means 128 MiB (2 GiB on a GPU), or up to 4 GiB if one example needs more.
    """
    available = PASS_BYTES * ROOM[device.type] if bound is None else bound
    if needed <= available:
        return available
    if bound is None and needed <= LARGEST_DEFAULT_BYTES:
        return needed
    reason = f"but `memory_bound={bound}` is smaller"
    if bound is None:
        reason = f"which is more than the default limit of {LARGEST_DEFAULT_BYTES} bytes"
    subject = subject[:1].upper() + subject[1:]
    raise ValueError(
        f"{subject} needs {needed} bytes, {reason}. Pass `memory_bound={needed}`{remedy}."
    )


def check_outputs(outputs: Tensor, least: int = 2) -> None:
    """Require finite outputs `[B, C]` or `[B, ..., C]` that have at least `least` dimensions.

    Within a pass over data, `DeferredChecks` reports outputs that are not finite.
    """
    if outputs.ndim < least:
        shape = tuple(outputs.shape)
        remedy = "flattens or selects them" if shape else "keeps a dimension for the examples"
        raise ValueError(
            f"The model returned outputs of shape {shape}. Supported shapes are [batch, outputs], "
            "[batch, positions, outputs], and [batch] for a single output. Wrap the model in a "
            f"module that {remedy}."
        )
    require(
        are_finite(outputs),
        lambda: ValueError(
            "The model's outputs contain NaN or Inf for these examples. Check the scale of the "
            "inputs and the checkpoint."
        ),
    )


def are_finite(values: Tensor) -> Tensor | bool:
    """Return whether all entries are finite; on a GPU, the answer is a tensor."""
    values = values.detach()
    if values.is_cpu and math.isfinite(values.sum()):
        return True  # The sum of finite entries may overflow, but no other sum is finite.
    if values.is_floating_point() and values.numel() > 0:
        # The largest magnitude is computed in a single pass, and is NaN or infinite if any entry
        # is.
        return torch.linalg.vector_norm(values, math.inf) < math.inf
    return values.isfinite().all()


def explain_unbatched(error: Exception, model: nn.Module, x: Inputs) -> None:
    """Explain errors that occur because the inputs are a single example, not a batch."""
    if (
        is_out_of_memory(error)
        or not isinstance(x, Tensor)
        or _takes(model, x)
        or not _takes(model, x.unsqueeze(0))
    ):
        return
    raise ValueError(
        f"The inputs of shape {tuple(x.shape)} are one example, without a dimension for the "
        f"examples. Pass `x.unsqueeze(0)`, of shape {(1, *x.shape)}."
    ) from error


def _takes(model: nn.Module, x: Tensor) -> bool:
    """Whether the model returns a row of outputs for the first of the inputs."""
    # A forward pass may raise any error.
    with suppress_unsupported(Exception), torch.no_grad():
        outputs = call(model, x[:1])
        return outputs.ndim > 1 and len(outputs) == 1
    return False


def explain_fixed_size(error: Exception, network: nn.Module, x: Inputs) -> None:
    """Explain errors of a network that runs for a batch, but not for one or two of its examples."""
    if is_out_of_memory(error) or not _runs(network, x):
        return
    if all(_runs(network, take(x, slice(0, number))) for number in (1, 2)):
        return
    raise ValueError(
        f"The model runs for the batch of {num_examples(x)} examples, but not for one or two of "
        f"them ({error}). Remove fixed batch sizes from its forward pass. If it computes the "
        "number of positions as the largest length in the batch, use the size of the padded inputs "
        "instead. If the examples are the nodes of a graph, pass the graph as one example."
    ) from error


def _runs(network: nn.Module, x: Inputs) -> bool:
    # A forward pass may raise any error.
    with suppress_unsupported(Exception), torch.no_grad(), preserve_attributes(network.modules()):
        call(network, x)
        return True
    return False


def are_repeated(outputs: Tensor, again: Tensor) -> bool:
    """Whether two forward passes give the same outputs, up to rounding."""
    if again.shape != outputs.shape:
        return False
    return torch.allclose(outputs, again, 1e-3, 1e-5 * float(outputs.abs().max()))


def check_repeatable(network: nn.Module, x: Inputs, outputs: Tensor, batch_outputs: Tensor) -> None:
    """Require that outputs are repeatable, and independent of other examples in the batch."""
    if are_repeated(outputs, batch_outputs):
        return
    with torch.no_grad(), preserve_attributes(network.modules()):
        again = call(network, x)
    if not are_repeated(outputs, again):
        raise ValueError(
            "Two forward passes give different outputs, so the model is not deterministic "
            "(`F.dropout` without `training=self.training`, added noise, ...). Make its "
            "forward pass deterministic in eval mode."
        )
    # Outputs of the same examples differ by rounding errors if the batches differ in size.
    eps = max(coarsest_eps(network), torch.finfo(outputs.dtype).eps)
    tolerance = max(1e-2, 16 * eps)
    largest = float(outputs.abs().max())
    has_its_shape = batch_outputs.shape == outputs.shape
    if not (
        has_its_shape and torch.allclose(outputs, batch_outputs, tolerance, tolerance * largest)
    ):
        raise mixing_error()


# The largest allowed distance from 1 of a sum of probabilities, which may be in half precision.
_ROUNDING = 1e-3


def classes_last(network: nn.Module, class_dim: int) -> nn.Module:
    """Change a `shared_copy` so that it moves the dimension of the classes to the end.

    A call raises an error if the outputs do not have this dimension, or if it is the dimension of
    the examples.
    """

    def move(_: nn.Module, __: Any, raw_outputs: Any) -> Tensor:
        outputs = logits_of(raw_outputs)
        has_dim = -outputs.ndim <= class_dim < outputs.ndim
        if not has_dim or class_dim in (0, -outputs.ndim):
            # The message does not state the batch size, because the package may have created the
            # batch itself.
            shape = ", ".join(["batch", *map(str, outputs.shape[1:])] if outputs.ndim else [])
            raise ValueError(
                f"`class_dim={class_dim}` must be a dimension of the model's outputs "
                f"other than the first, but the outputs have shape [{shape}]. Pass one of "
                "the other dimensions."
            )
        return outputs.movedim(class_dim, -1)

    network.register_forward_hook(move)
    return network


def targets_classes_last(targets: Tensor, ndim: int, class_dim: int | None) -> Tensor:
    """Reorder targets to match outputs `[B, ..., C]`.

    Targets with an entry for every output (regression, several labels) have the classes in the same
    dimension as the model's outputs, so their dimensions are also moved. Class indices do not
    change.
    """
    if class_dim is None or targets.ndim != ndim:
        return targets
    return targets.movedim(class_dim, -1)


def warn_of_probabilities(outputs: Tensor) -> None:
    """Warn if every row of the outputs `[B, ..., C]` is a distribution over C ≥ 2 classes.

    A single row of logits may be non-negative and sum to 1 by chance, but several rows hardly will.
    """
    if outputs.ndim < 2 or outputs.shape[-1] < 2 or outputs[..., 0].numel() < 2:
        return
    sums = outputs.double().sum(-1)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= _ROUNDING).all()):
        warn(
            "The model's outputs are probabilities: none is negative and each row sums to 1. "
            'likelihood="classification" takes logits and applies a softmax to them. Remove the '
            "softmax from the model, or return log-probabilities."
        )


def warn_of_sigmoid(network: nn.Module, outputs: Tensor) -> None:
    """Warn if the network ends with a sigmoid, and the outputs are between 0 and 1.

    The sigmoid may be the network's last module. If the outputs have an autograd graph, it may also
    be a function that the forward pass calls last.
    """
    last_module = list(network.modules())[-1]
    is_sigmoid = isinstance(last_module, nn.Sigmoid) or _last_operation(outputs) == _SIGMOID
    if is_sigmoid and bool(((outputs >= 0) & (outputs <= 1)).all()):
        warn(
            "The model's outputs are probabilities, because it ends with a sigmoid. "
            'likelihood="binary" and "multilabel" take logits and apply a sigmoid to them. Remove '
            "the sigmoid from the model."
        )


def warn_of_positive(outputs: Tensor, name: str, logarithm: str) -> None:
    """Warn if outputs that should be logarithms end with a softplus or an exponential.

    Args:
        outputs: The outputs, with the autograd graph of the network.
        name: The name of the logarithms, such as "log-variances", for the message.
        logarithm: Code that computes these logarithms, for the message.
    """
    if _last_operation(outputs, _BEFORE_OUTPUTS) in _POSITIVE and bool((outputs >= 0).all()):
        warn(
            f"The model ends with a softplus or an exponential, but the likelihood takes {name}. "
            f"Return {logarithm} from the model."
        )


def _last_operation(outputs: Tensor, skipped: tuple[str, ...] = _RESHAPING) -> str:
    """Return autograd's name of the last operation that is not skipped, or "" without a graph.

    An operation on several tensors that need gradients is skipped only if it joins them, and then
    the last tensor counts.
    """
    node = outputs.grad_fn
    while node is not None and node.name().startswith(skipped):
        inputs = [function for function, _ in node.next_functions if function is not None]
        if len(inputs) > 1 and not node.name().startswith(_JOINING):
            break
        node = inputs[-1] if inputs else None
    return "" if node is None else node.name()
