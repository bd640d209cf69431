"""Exported programs in a process that cannot import the package."""

import sys
from unittest import mock

import torch


def answers_alone(rank, programs):
    """What each program, `(path, inputs by their number)`, answers to each of its inputs."""
    answers = {}
    ours = [name for name in sys.modules if name.partition(".")[0] == "laplace_debias"]
    # Whatever imports them fails.
    with mock.patch.dict(sys.modules, dict.fromkeys(["laplace_debias", *ours])):
        for name, (path, batches) in programs.items():
            program = torch.export.load(path).module()
            for size, x in batches.items():
                kwargs = x if isinstance(x, dict) else {}
                args = () if kwargs else (x,) if torch.is_tensor(x) else x
                answers[name, size] = program(*args, **kwargs)
    return answers
