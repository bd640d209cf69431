"""Networks of the test problems, and their checkpoints."""

from laplace_debias.problems.models.all_cnn import all_cnn_c, digits_net, wide_digits_net
from laplace_debias.problems.models.checkpoints import load_checkpoint
from laplace_debias.problems.models.conv_net import conv_net
from laplace_debias.problems.models.published import resnet50, vit_little
from laplace_debias.problems.models.wide_resnet import WideResNet, wide_resnet

__all__ = [
    "WideResNet",
    "all_cnn_c",
    "conv_net",
    "digits_net",
    "load_checkpoint",
    "resnet50",
    "vit_little",
    "wide_digits_net",
    "wide_resnet",
]
