"""Exported programs on disk, and the check that they give what `predict` gives."""

import importlib.util
import io
from pathlib import Path

import torch

from laplace_debias.curvature.network.inputs import Inputs, join
from laplace_debias.laplace.export.answers import Answers
from laplace_debias.laplace.export.programs import Predictive, input_names, tensors_alone
from laplace_debias.system.atomic import check_target, written_atomically
from laplace_debias.system.out_of_memory import is_out_of_memory
from laplace_debias.system.threads import FORWARD_MODE

PROGRAM, ONNX = ".pt2", ".onnx"


def check_path(path: Path) -> None:
    """Require a path that can be written, of a known kind, before any work.

    Raises:
        ValueError: For another suffix than `.pt2` and `.onnx`.
        ImportError: For `.onnx` without the packages that write it.
        OSError: As `check_target`.
    """
    if path.suffix not in (PROGRAM, ONNX):
        raise ValueError(
            f"{path} ends in {path.suffix or 'no suffix'!r}: name it *.pt2 for torch.export or "
            "*.onnx for ONNX."
        )
    missing = [p for p in ("onnx", "onnxscript") if importlib.util.find_spec(p) is None]
    if path.suffix == ONNX and missing:
        raise ImportError(
            f"Writing ONNX needs {' and '.join(missing)}: pip install 'laplace-debias[onnx]', or "
            "name the file *.pt2."
        )
    check_target(path)


def write(
    path: Path, program: torch.export.ExportedProgram, example: Inputs, expected: Answers
) -> None:
    """Hold a program against what it should give, and write it atomically.

    Args:
        path: One that `check_path` lets pass.
        program: As `traced` gives it.
        example: Inputs on the model's device.
        expected: What it should give for them, by name; not all of its answers.

    Raises:
        RuntimeError: If the program gives other numbers.
        NotImplementedError: If ONNX lacks an operation.
        OSError: As `written_atomically`.
    """
    args, kwargs = tensors_alone(example)
    with torch.no_grad():
        answers = program.module()(*args, **kwargs)
    _check(answers, expected)
    with FORWARD_MODE:
        is_onnx = path.suffix == ONNX
        data = _onnx(program, input_names(example), list(answers)) if is_onnx else _saved(program)
    with written_atomically(path, make_folders=False) as temporary:
        temporary.write_bytes(data)


def traced(predictive: Predictive, example: Inputs) -> torch.export.ExportedProgram:
    """A predictive as a program for any number of examples.

    Args:
        predictive: The predictive.
        example: Inputs on the model's device.

    Raises:
        NotImplementedError: If it cannot be traced.
    """
    # Of one example torch would take the 1 for a constant.
    args, kwargs = tensors_alone(join([example, example]))
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in input_names(example)}
    try:
        # Recording is torch's business of one thread.
        with FORWARD_MODE, torch.no_grad():
            return torch.export.export(
                predictive.eval(), args, kwargs, dynamic_shapes=shapes, strict=False
            )
    # Whatever it raises: torch's own errors have no class in common.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise NotImplementedError(
            f"torch.export cannot trace the model's forward pass for any number of examples "
            f"({type(error).__name__}: {reason}). Take out what depends on the values of tensors "
            "(`if`, `.item()`, loops) or on a fixed number of examples."
        ) from error


def _check(answers: Answers, expected: Answers) -> None:
    for name, value in expected.items():
        tolerance = torch.finfo(value.dtype).eps ** 0.5
        scale = max(1.0, float(value.abs().max()))
        difference = float((answers[name] - value).abs().max())
        if not difference <= tolerance * scale:
            raise RuntimeError(
                f"The exported {name} of the example differ from those of `predict` by "
                f"{difference:.3g}: torch.export did not record what the model computes. Nothing "
                "was written; look for state that the forward pass changes."
            )


def _saved(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _onnx(program: torch.export.ExportedProgram, names: list[str], answers: list[str]) -> bytes:
    try:
        found = torch.onnx.export(
            program,
            dynamo=True,
            input_names=names,
            output_names=answers,
            external_data=False,
            verbose=False,
        )
        assert found is not None
        return found.model_proto.SerializeToString()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise NotImplementedError(
            f"torch.onnx cannot write the program ({type(error).__name__}: {reason}): name the "
            "file *.pt2."
        ) from error
