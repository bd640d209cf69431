"""A randomised basis of an operator's range, and what leaving one probe out does."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.estimators.quadratic_forms import mean_of


class RangeSketch:
    r"""Probes Ω `[n, l]` and the factors of their images, $A\Omega = QR$."""

    def __init__(self, probes: Float[Tensor, "n l"], images: Float[Tensor, "n l"]) -> None:
        self.probes = probes
        self.Q, self.R = torch.linalg.qr(images)

    def left_out(self) -> Float[Tensor, "l l"]:
        r"""Unit vectors $s_i$, as columns, that tell the basis without probe i.

        $Q_{(i)} Q_{(i)}^\top = Q(I - s_i s_i^\top)Q^\top$ is the projection on the images of all
        probes but i: $s_i$ is orthogonal to all columns of R but the i-th, so that these are the
        columns of $R^{-\top}$, scaled.

        Reference:
            Epperly, Tropp, Webber. XTrace: making the most of every sample in stochastic trace
            estimation. SIAM Journal on Matrix Analysis and Applications, 2024, section 2.3.
        """
        R = self.R.clone()
        diagonal = R.diagonal()
        scale = R.abs().max()
        least = torch.finfo(R.dtype).eps * torch.where(scale > 0, scale, torch.ones_like(scale))
        # An operator of low rank makes R singular: any direction of rounding size does as s_i.
        diagonal.copy_(torch.where(diagonal.abs() < least, least, diagonal))
        eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
        inverse = torch.linalg.solve_triangular(R.T, eye, upper=False)
        return inverse / inverse.norm(dim=0)


class LeftOutPairs:
    """The effect of leaving out a second probe, for the covariance of leave-one-out estimates.

    Leaving out j as well as i takes $u_{ij}$ from the basis: $s_j$ without its part along $s_i$, of
    unit length. Entries `[i, j]` belong to estimate i, the diagonal to nothing: `cosine` and `sine`
    of the angles between the $s_i$, and `known`, false where there is no $u_{ij}$; the sine is then
    1.
    """

    def __init__(self, S: Float[Tensor, "l l"]) -> None:
        self._S = S
        self.cosine = S.T @ S
        sine_squared = (1 - self.cosine**2).clamp(min=0)
        # Parallel vectors are those of an operator whose range is all in the sketch.
        self.known = sine_squared > torch.finfo(S.dtype).eps ** 0.5
        self.known.fill_diagonal_(False)
        self.sine = torch.where(self.known, sine_squared, torch.ones_like(sine_squared)).sqrt()

    def project(self, vectors: Float[Tensor, "l l"]) -> Float[Tensor, "l l"]:
        r"""$u_{ij}^\top v_i$ of the columns $v_i$."""
        products = vectors.T @ self._S
        return self._mask((products - self.cosine * products.diagonal()[:, None]) / self.sine)

    def quadratic(self, matrix: Float[Tensor, "l l"]) -> Float[Tensor, "l l"]:
        r"""$u_{ij}^\top M u_{ij}$."""
        K = self._S.T @ matrix @ self._S
        own = K.diagonal()
        mixed = own[None, :] - self.cosine * (K + K.T) + self.cosine**2 * own[:, None]
        return self._mask(mixed / self.sine**2)

    def mean_of(
        self, samples: Float[Tensor, "*n l"], products: Float[Tensor, "*n l"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""The mean of leave-one-out estimates, its standard error and degrees of freedom.

        The estimates $t_i$ are unbiased given all probes but i. So with $\Delta_{ij} = t_i -
        t_i^{(j)}$, where $t_i^{(j)}$ leaves out j too, $\mathrm{cov}(t_i, t_j) = \mathbb{E}\,
        \Delta_{ij}\Delta_{ji}$, and the variance of the mean is that of independent estimates plus
        the mean of these `products` over pairs, which come summed over j. (The paper leaves the
        second part out, which makes standard errors too small where the spectrum decays.)
        """
        count = samples.shape[-1]
        # The covariance is an estimate too, and noisy where the spectrum decays fast: it may raise
        # the variance but not lower it, which on flat spectra makes standard errors too large.
        return mean_of(samples, (products.sum(dim=-1) / (count * (count - 1))).clamp(min=0))

    def _mask(self, values: Tensor) -> Tensor:
        return torch.where(self.known, values, torch.zeros_like(values))
