"""A slow, dense, explicit reference in float64, written from the equations alone.

Nothing here imports the package. Every quantity is computed example by example, as a dense matrix,
the way the formula reads. Networks are small modules that map `x [B, ...]` to outputs `[B, C]`.

Units: the curvature is that of the mean loss `(1/B) sum_n l_n`, where `l_n` is the negative
log-likelihood of one example. A weight `[d_out, ...]` is flattened row-major to `d_out * d_in`
numbers, so its Kronecker-factored block is `kron(G, A)` with `G [d_out, d_out]` first.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Assert that all entries are equal, up to a fraction of the largest expected entry."""
    assert actual.shape == expected.shape
    deviations = (actual - expected).abs()
    largest = expected.abs().max()
    worst = deviations.argmax()
    assert deviations.max() <= tolerance * largest, (
        f"{actual.flatten()[worst]:.12g} instead of {expected.flatten()[worst]:.12g} "
        f"at entry {int(worst)}; the largest expected entry is {largest:.3g}"
    )


# ------------------------------------------------------------------------------- likelihoods


def nll(likelihood: str, outputs: Tensor, targets: Tensor, sigma=None) -> Tensor:
    """Negative log-likelihood of every example, all constants included.

    Args:
        likelihood: "classification" (softmax), "regression" (Gaussian) or "binary" (Bernoulli).
        outputs: `[B, C]`, logits or means; `C = 1` for "binary".
        targets: classes `[B]`, values `[B, C]`, or zeros and ones `[B]` or `[B, 1]`.
        sigma: noise standard deviation of "regression", a number or `[C]`.

    Returns:
        `[B]`, summed over the outputs of an example.
    """
    num_examples, num_outputs = outputs.shape
    if likelihood == "classification":
        target_logits = torch.stack([outputs[n, targets[n]] for n in range(num_examples)])
        return torch.logsumexp(outputs, dim=1) - target_logits
    if likelihood == "regression":
        std = torch.as_tensor(sigma, dtype=outputs.dtype).expand(num_outputs)
        residuals = (outputs - targets) / std
        constants = std.log().sum() + 0.5 * num_outputs * math.log(2 * math.pi)
        return 0.5 * (residuals**2).sum(dim=1) + constants
    if likelihood == "binary":
        assert num_outputs == 1
        logits = outputs[:, 0]
        labels = targets.reshape(num_examples).to(outputs.dtype)
        zeros = torch.zeros_like(logits)
        # -log p = y log(1 + exp(-f)) + (1 - y) log(1 + exp(f))
        return labels * torch.logaddexp(zeros, -logits) + (1 - labels) * torch.logaddexp(
            zeros, logits
        )
    raise ValueError(f"unknown likelihood {likelihood!r}")


def any_targets(likelihood: str, outputs: Tensor) -> Tensor:
    """Return zeros as targets, for a loss whose Hessian does not depend on the targets."""
    if likelihood == "classification":
        return torch.zeros(len(outputs), dtype=torch.long)
    return torch.zeros_like(outputs)


def loss_hessian(likelihood: str, outputs: Tensor, sigma=None) -> Tensor:
    """Hessian of every example's `nll` in its outputs, by autograd.

    Args:
        likelihood: as in `nll`.
        outputs: `[B, C]`.
        sigma: as in `nll`.

    Returns:
        `[B, C, C]`.
    """
    outputs = outputs.detach()
    hessians = []
    for n in range(len(outputs)):
        targets = any_targets(likelihood, outputs[n : n + 1])
        hessians.append(
            torch.autograd.functional.hessian(
                lambda f, targets=targets: nll(likelihood, f[None], targets, sigma)[0], outputs[n]
            )
        )
    return torch.stack(hessians)


def loss_hessian_root(likelihood: str, outputs: Tensor, sigma=None) -> Tensor:
    """Columns `s_c` with `sum_c s_c s_c^T` the loss Hessian of an example: `[B, C, C]`, by eigh."""
    roots = []
    for hessian_n in loss_hessian(likelihood, outputs, sigma):
        values, vectors = torch.linalg.eigh(hessian_n)
        roots.append(vectors * values.clamp(min=0).sqrt())
    return torch.stack(roots)


# ------------------------------------------------------- Jacobians, exact curvature matrices


def flat_jacobian(model: nn.Module, x: Tensor, names: Sequence[str]) -> Tensor:
    """Jacobians in the named parameters, one example and one output after the other: `[B, C, D]`.

    Parameters are flattened row-major; outputs of further dimensions too.
    """
    parameters = {
        name: model.get_parameter(name).detach().clone().requires_grad_() for name in names
    }
    rows = []
    for n in range(len(x)):
        for output in functional_call(model, parameters, (x[n : n + 1],)).flatten():
            gradients = torch.autograd.grad(
                output, list(parameters.values()), retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows).view(len(x), -1, len(rows[0]))


def flat_parameters(model: nn.Module, names: Sequence[str]) -> Tensor:
    """The named parameters, flattened row-major and joined in this order: `[D]`."""
    parameters = dict(model.named_parameters())
    return torch.cat([parameters[name].detach().reshape(-1) for name in names])


def ggn(model: nn.Module, x: Tensor, likelihood: str, names: Sequence[str], sigma=None) -> Tensor:
    """Exact dense GGN of the mean loss, joint over the names: `(1/B) sum_n J_n^T H_n J_n`.

    Returns:
        `[D, D]`, off-diagonal blocks included.
    """
    jacobian = flat_jacobian(model, x, names)
    hessians = loss_hessian(likelihood, model(x), sigma)
    total = torch.zeros(jacobian.shape[2], jacobian.shape[2], dtype=jacobian.dtype)
    for n in range(len(x)):
        total = total + jacobian[n].T @ hessians[n] @ jacobian[n]
    return total / len(x)


def ggn_block(model: nn.Module, x: Tensor, likelihood: str, name: str, sigma=None) -> Tensor:
    """Exact dense GGN of the mean loss in one parameter, flattened row-major: `[D, D]`."""
    return ggn(model, x, likelihood, [name], sigma)


# ----------------------------------------------------------------------- Kronecker factors


def conv_patches(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The input patches of a convolution, by loops over output positions and kernel offsets.

    Args:
        layer: `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, zero padding, `groups=1`.
        inputs: `[B, C_in, *spatial]`.

    Returns:
        `[B, T, d_in]`: positions row-major, `d_in` ordered as `C_in`, then the kernel's axes.
    """
    assert isinstance(layer, CONVOLUTIONS)
    assert layer.groups == 1
    assert layer.padding_mode == "zeros"
    kernel = layer.kernel_size
    stride = layer.stride
    dilation = layer.dilation
    spatial = inputs.shape[2:]
    axes = range(len(kernel))
    reach = [dilation[i] * (kernel[i] - 1) for i in axes]
    # The numbers of zeros to the left and to the right of the image, along each axis.
    if layer.padding == "same":
        pad_left = [reach[i] // 2 for i in axes]
        pad_right = [reach[i] - pad_left[i] for i in axes]
    elif layer.padding == "valid":
        pad_left = [0 for _ in axes]
        pad_right = [0 for _ in axes]
    else:
        pad_left = list(layer.padding)
        pad_right = list(layer.padding)
    padded = [pad_left[i] + spatial[i] + pad_right[i] for i in axes]
    output_sizes = [(padded[i] - reach[i] - 1) // stride[i] + 1 for i in axes]

    positions = list(itertools.product(*[range(size) for size in output_sizes]))
    offsets = list(itertools.product(*[range(size) for size in kernel]))
    channels = inputs.shape[1]
    patches = inputs.new_zeros(len(inputs), len(positions), channels * len(offsets))
    for t, position in enumerate(positions):
        for k, offset in enumerate(offsets):
            index = [position[i] * stride[i] + offset[i] * dilation[i] - pad_left[i] for i in axes]
            if not all(0 <= index[i] < spatial[i] for i in axes):
                continue  # in the padding, which is zero
            for channel in range(channels):
                pixel = inputs[(slice(None), channel, *index)]
                patches[:, t, channel * len(offsets) + k] = pixel
    return patches


def layer_statistics(
    model: nn.Module, x: Tensor, likelihood: str, layer_path: str, sigma=None
) -> tuple[Tensor, Tensor]:
    """Return a layer's inputs and output gradients, per position.

    `g[n, t, c] = (d f_n / d z_nt)^T s_nc`, with `z_nt` the layer's output at position t and `s_nc`
    column c of the root of the loss Hessian. For one example at a time, a zero perturbation is
    added to the layer's output, and each output of the network is differentiated in it.

    Args:
        model: maps `[B, ...]` to `[B, C]`.
        x: inputs `[B, ...]`.
        likelihood: as in `nll`.
        layer_path: an `nn.Linear` (inputs `[B, *, d_in]`) or a convolution, used once per pass.
        sigma: as in `nll`.

    Returns:
        `a [B, T, d_in]` and `g [B, T, C, d_out]`.
    """
    model = copy.deepcopy(model)
    layer = model.get_submodule(layer_path)
    all_inputs = []
    all_gradients = []
    for n in range(len(x)):
        caught = {}

        def catch(module, args, output, caught=caught):
            assert not caught, "the layer must be used once per pass"
            caught["input"] = args[0].detach()
            caught["perturbation"] = torch.zeros_like(output, requires_grad=True)
            return output + caught["perturbation"]

        handle = layer.register_forward_hook(catch)
        outputs = model(x[n : n + 1])[0]
        handle.remove()

        jacobian = []  # of the outputs in the layer's output: [C, T, d_out] once stacked
        for c in range(len(outputs)):
            (row,) = torch.autograd.grad(outputs[c], caught["perturbation"], retain_graph=True)
            if isinstance(layer, nn.Linear):
                row = row.reshape(-1, layer.out_features)
            else:
                row = row.reshape(layer.out_channels, -1).T
            jacobian.append(row)
        jacobian = torch.stack(jacobian)

        root = loss_hessian_root(likelihood, outputs[None], sigma)[0]
        gradients = []  # [C, T, d_out] once stacked
        for column in root.T:
            gradients.append(sum(column[c] * jacobian[c] for c in range(len(outputs))))
        all_gradients.append(torch.stack(gradients).transpose(0, 1))
        if isinstance(layer, nn.Linear):
            all_inputs.append(caught["input"].reshape(-1, layer.in_features))
        else:
            all_inputs.append(conv_patches(layer, caught["input"])[0])
    return torch.stack(all_inputs), torch.stack(all_gradients)


def kfac_factors(
    model: nn.Module,
    x: Tensor,
    likelihood: str,
    layer_path: str,
    sigma=None,
    sharing: str = "expand",
) -> dict[str, Tensor]:
    """The Kronecker factors of a layer's weight, and the exact block of its bias.

    "expand": `A = (1/N) sum_n sum_t a a^T`, `G = (1/(N T)) sum_n sum_t sum_c g g^T`.
    "reduce": `A = (1/N) sum_n abar abar^T`, `abar = mean_t a`, and
    `G = (1/N) sum_n sum_c ghat ghat^T`, `ghat = sum_t g`.
    The bias, under both: `(1/N) sum_n sum_c (sum_t g)(sum_t g)^T`.

    Returns:
        "A" `[d_in, d_in]`, "G" `[d_out, d_out]`, "bias" `[d_out, d_out]`.
    """
    a, g = layer_statistics(model, x, likelihood, layer_path, sigma)
    num_data, num_positions, d_in = a.shape
    num_columns, d_out = g.shape[2:]
    A = torch.zeros(d_in, d_in, dtype=a.dtype)
    G = torch.zeros(d_out, d_out, dtype=g.dtype)
    bias = torch.zeros(d_out, d_out, dtype=g.dtype)
    for n in range(num_data):
        a_mean = sum(a[n, t] for t in range(num_positions)) / num_positions
        if sharing == "expand":
            for t in range(num_positions):
                A += torch.outer(a[n, t], a[n, t]) / num_data
        elif sharing == "reduce":
            A += torch.outer(a_mean, a_mean) / num_data
        else:
            raise ValueError(f"unknown sharing {sharing!r}")
        for c in range(num_columns):
            g_sum = sum(g[n, t, c] for t in range(num_positions))
            bias += torch.outer(g_sum, g_sum) / num_data
            if sharing == "reduce":
                G += torch.outer(g_sum, g_sum) / num_data
                continue
            for t in range(num_positions):
                G += torch.outer(g[n, t, c], g[n, t, c]) / (num_data * num_positions)
    return {"A": A, "G": G, "bias": bias}


# ------------------------------------------------------------- blocks: directions, magnitudes


def kfac_block(factors: dict[str, Tensor]) -> Tensor:
    """The dense block `kron(G, A)` of the weight: `[d_out * d_in, d_out * d_in]`."""
    return torch.kron(factors["G"], factors["A"])


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors as columns, of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0), vectors.flip(1)


def diagonalises(basis: Tensor, matrix: Tensor, tolerance: float = 1e-8) -> bool:
    """Whether the basis is square, orthonormal and `U^T M U` diagonal, up to the tolerance.

    The off-diagonal part is compared with the largest entry of the matrix.
    """
    if basis.shape != matrix.shape:
        return False
    identity = torch.eye(len(basis), dtype=basis.dtype)
    rotated = basis.T @ matrix @ basis
    off_diagonal = rotated - torch.diag(torch.diagonal(rotated))
    scale = max(float(matrix.abs().max()), torch.finfo(matrix.dtype).tiny)
    return bool(
        (basis.T @ basis - identity).abs().max() <= tolerance
        and off_diagonal.abs().max() <= tolerance * scale
    )


def kronecker_basis(
    factors: dict[str, Tensor], U_G: Tensor | None = None, U_A: Tensor | None = None
) -> Tensor:
    """The dense eigenvectors `kron(U_G, U_A)` of `kron(G, A)`, as columns.

    A repeated eigenvalue leaves its eigenvectors free, so a basis may be handed in; then it is
    checked that it diagonalises its factor.
    """
    U_G = eigen(factors["G"])[1] if U_G is None else U_G
    U_A = eigen(factors["A"])[1] if U_A is None else U_A
    assert diagonalises(U_G, factors["G"]), "U_G does not diagonalise G"
    assert diagonalises(U_A, factors["A"]), "U_A does not diagonalise A"
    return torch.kron(U_G, U_A)


def measured_block(U: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Return `U diag(u_i^T C u_i) U^T`, and the curvature `u_i^T C u_i` along the directions."""
    magnitudes = torch.stack([U[:, i] @ C @ U[:, i] for i in range(U.shape[1])])
    return U @ torch.diag(magnitudes) @ U.T, magnitudes


def eigenprojectors(matrix: Tensor, gap: float = 1e-9) -> list[Tensor]:
    """The projectors onto the eigenspaces of a symmetric matrix, which its eigenvectors fix.

    Eigenvalues nearer than `gap`, as a share of the largest, are one.
    """
    values, vectors = eigen(matrix)
    starts = (values[:-1] - values[1:] > gap * values[0].abs()).nonzero()[:, 0] + 1
    spaces = torch.tensor_split(vectors, starts.tolist(), dim=1)
    return [space @ space.T for space in spaces]


def pooled_block(factors1: dict[str, Tensor], C: Tensor) -> Tensor:
    """Directions of one K-FAC, magnitudes from C: the mean of C over each pair of eigenspaces.

    Along eigenvectors of distinct eigenvalues that is `u^T C u`; where eigenvalues coincide, the
    null space above all, it is what every basis of the space measures on average.
    """
    block = torch.zeros_like(C)
    for P in eigenprojectors(factors1["G"]):
        for Q in eigenprojectors(factors1["A"]):
            projector = torch.kron(P, Q)
            block += projector * (projector * C).sum() / projector.trace()
    return block


def ekfac_block(
    factors1: dict[str, Tensor],
    exact_block: Tensor,
    U_G: Tensor | None = None,
    U_A: Tensor | None = None,
) -> Tensor:
    """EKFAC, dense: the directions of `factors1`, an exact GGN block measured along them.

    Args:
        factors1: K-FAC of the directions' data.
        exact_block: `ggn_block` of the weight, on the magnitudes' data.
        U_G: eigenvectors of `factors1["G"]` to use; None to compute them by eigh.
        U_A: eigenvectors of `factors1["A"]` to use; None to compute them by eigh.

    Returns:
        `[d_out * d_in, d_out * d_in]`.
    """
    return measured_block(kronecker_basis(factors1, U_G, U_A), exact_block)[0]


# ----------------------------------------------------------------------------- the posterior


def prior_diagonals(blocks: Sequence[Tensor], prior_precision) -> list[Tensor]:
    """Return one vector of prior precisions per block; a number stands for equal entries."""
    if isinstance(prior_precision, float | int):
        prior_precision = [prior_precision] * len(blocks)
    assert len(prior_precision) == len(blocks)
    return [
        torch.as_tensor(delta, dtype=block.dtype).expand(len(block)).clone()
        for block, delta in zip(blocks, prior_precision, strict=True)
    ]


def posterior_precision(blocks: Sequence[Tensor], num_data: int, prior_precision) -> Tensor:
    """Dense block-diagonal `P = N C + diag(delta)`: `[D, D]`."""
    diagonals = prior_diagonals(blocks, prior_precision)
    return torch.block_diag(
        *[num_data * C + torch.diag(delta) for C, delta in zip(blocks, diagonals, strict=True)]
    )


def posterior_covariance(blocks: Sequence[Tensor], num_data: int, prior_precision) -> Tensor:
    """Dense inverse of `posterior_precision`: `[D, D]`.

    Args:
        blocks: dense curvature blocks of the mean loss, in the order of the parameters.
        num_data: number N of training examples.
        prior_precision: delta, one number, or a list with one number or vector for each block.
    """
    return torch.linalg.inv(posterior_precision(blocks, num_data, prior_precision))


def functional_covariance(J: Tensor, cov: Tensor) -> Tensor:
    """Covariance of the linearised outputs, `J_n cov J_n^T`: `[B, C, D], [D, D] -> [B, C, C]`."""
    return torch.stack([J_n @ cov @ J_n.T for J_n in J])


def log_marginal_likelihood(
    nll_sum: Tensor, theta: Tensor, dense_precision: Tensor, prior_precision_diag: Tensor
) -> Tensor:
    """Laplace's log evidence, `log p(D|t*) + log N(t*|0, 1/delta) + D/2 log 2 pi - 1/2 log det P`.

    Args:
        nll_sum: `nll` summed over the N training examples.
        theta: the mode minus the prior's mean, `[D]`.
        dense_precision: `P = N C + diag(delta)`, `[D, D]`.
        prior_precision_diag: delta, `[D]`.
    """
    dim = len(theta)
    log_likelihood = -nll_sum
    log_prior = (
        0.5 * prior_precision_diag.log().sum()
        - 0.5 * dim * math.log(2 * math.pi)
        - 0.5 * (prior_precision_diag * theta**2).sum()
    )
    sign, log_det = torch.linalg.slogdet(dense_precision)
    assert sign > 0
    return log_likelihood + log_prior + 0.5 * dim * math.log(2 * math.pi) - 0.5 * log_det


# ------------------------------------------------------------------------------ small models


def make(seed: int, build: Callable[[], nn.Module], input_shape, likelihood: str, sigma=None):
    """A seeded network in float64 with 6 examples; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().double().eval()
        x = torch.randn(6, *input_shape, dtype=torch.float64)
        with torch.no_grad():
            outputs = model(x)
        if likelihood == "classification":
            y = torch.randint(outputs.shape[1], (6,))
        elif likelihood == "regression":
            y = outputs + torch.randn_like(outputs)
        else:
            y = torch.randint(2, (6, 1)).double()
    return model, x, y, likelihood, sigma


POOL = nn.AdaptiveAvgPool2d
# The arguments of `make`, by the name of the model.
_SMALL = {
    # Stride, padding and dilation, average pooling, 3 classes.
    "conv2d": (0, lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(3, 4, (2, 3), stride=(1, 2), padding=(1, 2), dilation=(2, 1)), nn.Sigmoid(),
        POOL(1), nn.Flatten(), nn.Linear(4, 3),
    ), (2, 7, 6), "classification"),
    # Convolutions only, as in All-CNN-C: the classifier is a 1 x 1 convolution, then pooled.
    "conv2d_all": (1, lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"), nn.ReLU(), nn.Conv2d(4, 3, 2, stride=2, bias=False),
        nn.ReLU(), nn.Conv2d(3, 4, 1), POOL(1), nn.Flatten(),
    ), (2, 5, 4), "classification"),
    # One-dimensional convolutions, 4 classes, no pooling.
    "conv1d": (2, lambda: nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.SiLU(), nn.Conv1d(4, 3, 2, dilation=2),
        nn.ELU(), nn.Flatten(), nn.Linear(9, 4),
    ), (2, 9), "classification"),
    # Three-dimensional convolution, 3 regression outputs.
    "conv3d": (3, lambda: nn.Sequential(
        nn.Conv3d(2, 3, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 0), dilation=(1, 1, 2)),
        nn.Tanh(), nn.AdaptiveAvgPool3d((2, 1, 1)), nn.Flatten(), nn.Linear(6, 3),
    ), (2, 2, 3, 4), "regression", 0.7),
    # A multilayer perceptron with tanh, 4 classes.
    "mlp_tanh": (4, lambda: nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4),
    ), (5,), "classification"),
    # Linear layers over the tokens of `[B, T, d_in]`, 3 classes.
    "tokens": (5, lambda: nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3),
    ), (5, 3), "classification"),
    # GELU, LeakyReLU and max pooling, 5 classes.
    "gelu_leaky_pool": (6, lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2),
        nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(12, 5),
    ), (1, 6, 6), "classification"),
    # 3 regression outputs with one noise level.
    "regression": (7, lambda: nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
    ), (4,), "regression", 0.5),
    # 3 regression outputs, each with a noise level of its own, after a convolution.
    "regression_per_output": (8, lambda: nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(15, 3)
    ), (2, 5), "regression", torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)),
    # One logit; the targets are `[B, 1]`.
    "binary": (9, lambda: nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.GELU(), nn.Linear(3, 1)
    ), (4,), "binary"),
}  # fmt: skip
SMALL_MODELS: dict[str, Callable[[], tuple]] = {
    name: partial(make, *arguments) for name, arguments in _SMALL.items()
}
