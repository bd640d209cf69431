"""Translation of torch.export programs to ONNX, for runtimes without torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laplace_debias.system.checks import check_extra
from laplace_debias.system.memory import is_out_of_memory

Answers = dict[str, Tensor]

_REMEDY = "Export the posterior to a .pt2 file, which torch can run."


def check_onnx() -> None:
    """Require the packages that write and run an ONNX model."""
    check_extra("onnx", "onnx", "onnxscript", "onnxruntime")


def check_onnx_inputs(inputs: Iterable[Tensor]) -> None:
    """Require inputs that onnxruntime accepts.

    Raises:
        NotImplementedError: If an input is in bfloat16.
    """
    if any(x.dtype == torch.bfloat16 for x in inputs):
        raise NotImplementedError(
            "Inputs in bfloat16 cannot be exported to ONNX, because onnxruntime takes arrays of "
            f"NumPy, and NumPy has no bfloat16. {_REMEDY}"
        )


def onnx_model(program: torch.export.ExportedProgram, output_names: Sequence[str]) -> bytes:
    """Translate a program to ONNX for any number of examples.

    Raises:
        NotImplementedError: If ONNX has no operator for a part of the program.
    """
    with refusing("The program cannot be written as ONNX"):
        translated = torch.onnx.export(
            program, dynamo=True, output_names=list(output_names), verbose=False
        )
        assert translated is not None  # only an export to a file returns None
        return translated.model_proto.SerializeToString()


def onnx_answers(model: bytes, inputs: Mapping[str, Tensor]) -> Answers:
    """Run an ONNX model on the CPU, and return its outputs by name.

    Raises:
        NotImplementedError: If onnxruntime does not implement an operator for the dtype of the
            model.
    """
    from onnxruntime import InferenceSession

    with refusing("onnxruntime cannot run the program as ONNX"):
        session = InferenceSession(model, providers=["CPUExecutionProvider"])
        # Inputs on which the outputs do not depend are absent from the model and must not be
        # passed.
        names = [argument.name for argument in session.get_inputs()]
        arrays = {name: inputs[name].detach().cpu().numpy() for name in names}
        outputs = session.run(None, arrays)
        output_names = [argument.name for argument in session.get_outputs()]
    return {name: torch.as_tensor(array) for name, array in zip(output_names, outputs, strict=True)}


@contextmanager
def refusing(failure: str, remedy: str = _REMEDY) -> Iterator[None]:
    """Raise a `NotImplementedError` that states the failure and a remedy, unless memory ran out."""
    try:
        yield
    # The errors of torch, onnxscript, protobuf and onnxruntime have no common base class, so every
    # exception is caught.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise NotImplementedError(
            f"{failure} ({type(error).__name__}: {reason}). {remedy}"
        ) from error
