"""A program of torch.export as an ONNX model, for runtimes without torch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laplace_debias.system.checks import check_extra
from laplace_debias.system.memory import is_out_of_memory

Answers = dict[str, Tensor]


def check_onnx() -> None:
    """Require the packages that write an ONNX model and run it."""
    check_extra("onnx", "onnx", "onnxscript", "onnxruntime")


def onnx_model(program: torch.export.ExportedProgram, output_names: Sequence[str]) -> bytes:
    """Translate a program to ONNX, for any number of examples.

    Raises:
        NotImplementedError: If ONNX has no operator for a part of the program.
    """
    try:
        translated = torch.onnx.export(
            program, dynamo=True, output_names=list(output_names), verbose=False
        )
        assert translated is not None  # It is None only for a program that is written to a file.
        return translated.model_proto.SerializeToString()
    # It may raise anything: the errors of torch, onnxscript and protobuf have no class in common.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise NotImplementedError(
            f"The program cannot be written as ONNX ({type(error).__name__}: {reason}). Export "
            "it to a .pt2 file, which torch can run."
        ) from error


def onnx_answers(model: bytes, inputs: Mapping[str, Tensor]) -> Answers:
    """Run an ONNX model on the CPU, and return its outputs by name."""
    from onnxruntime import InferenceSession

    session = InferenceSession(model, providers=["CPUExecutionProvider"])
    # An input that the outputs do not depend on is not in the model.
    names = [argument.name for argument in session.get_inputs()]
    arrays = {name: inputs[name].detach().cpu().numpy() for name in names}
    outputs = session.run(None, arrays)
    output_names = [argument.name for argument in session.get_outputs()]
    return {name: torch.as_tensor(array) for name, array in zip(output_names, outputs, strict=True)}
