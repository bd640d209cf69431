"""Models that are not what they look like: computed right, or refused with a reason."""

import pytest
import torch
import torch.nn.functional as F
from oracle import flat_jacobian, functional_covariance, ggn_block
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.network.fingerprint import changed, fingerprint


def examples(number=12):
    return torch.randn(number, 4), torch.randint(3, (number,))


class Mlp(nn.Module):
    """A small network whose end is the argument's business."""

    def __init__(self, ending=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.ending = ending

    def forward(self, x):
        outputs = self.last(torch.tanh(self.first(x)))
        return outputs if self.ending is None else self.ending(outputs)


def divided_in_place(outputs):
    outputs /= 2
    return outputs


def one_output_replaced(outputs):
    outputs[:, 0] = outputs[:, 1].exp()
    return outputs


# --------------------------------------------------------------- outputs overwritten in place


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
@pytest.mark.parametrize(
    "ending",
    [divided_in_place, one_output_replaced, lambda outputs: F.relu(outputs, inplace=True)],
    ids=["divided", "replaced", "relu"],
)
def test_outputs_overwritten_in_place_have_the_dense_variance(ending, curvature):
    model = Mlp(ending).double().eval()
    x, y = examples()
    la = Laplace(model, curvature=curvature).fit_batches([(x.double(), y)])
    J = flat_jacobian(model, x[:3].double(), la.param_names)
    expected = J @ la.posterior.covariance.to_dense() @ J.mT
    mean, covariance = la.functional(x[:3].double())
    torch.testing.assert_close(mean, model(x[:3].double()))
    torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------- parameters used outside their layers


class TiedHead(nn.Module):
    """A language model whose head is the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        return F.linear(torch.tanh(self.layer(self.table(tokens))), self.table.weight)


class Regularised(Mlp):
    def forward(self, x):
        return super().forward(x) + self.last.weight.sum()


class UsedTwice(Mlp):
    def forward(self, x):
        return super().forward(x) + F.linear(x[:, :1].expand(-1, 6), self.last.weight)


def is_that_of_dense_jacobians(la, x):
    flat = nn.Sequential(la.model, nn.Flatten())  # of all positions
    J = flat_jacobian(flat, x, [f"0.{name}" for name in la.param_names])
    covariance = la.posterior.covariance.to_dense()
    torch.testing.assert_close(la.functional(x)[1], functional_covariance(J, covariance))


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
def test_a_tied_head_has_the_curvature_of_both_uses(curvature):
    data = [(torch.randint(7, (5, 3)), torch.randint(7, (5, 3)))]
    model = TiedHead().double().eval()
    is_that_of_dense_jacobians(Laplace(model, curvature=curvature).fit_batches(data), data[0][0])


@pytest.mark.parametrize("kind", [Regularised, UsedTwice])
@pytest.mark.parametrize("options", [{}, {"joint": True}, {"backend": "hooks"}])
def test_a_weight_used_again_has_the_curvature_of_all_uses(kind, options):
    model, (x, y) = kind().double().eval(), examples()
    la = Laplace(model, **options).fit_batches([(x.double(), y)])
    is_that_of_dense_jacobians(la, x.double())
    exact = ggn_block(model, x.double(), "classification", "last.weight")
    found = la.posterior.curvature.blocks["last.weight"].to_dense()
    torch.testing.assert_close(found, exact)


class Upsampled(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, **options)
        self.size = None if options else (10, 10)

    def forward(self, x):
        return self.up(x, output_size=self.size).square().mean((2, 3))


@pytest.mark.parametrize("options", [{}, {"output_padding": 1}])
def test_an_output_size_that_the_layer_does_not_know_is_followed(options):
    x, y = torch.randn(4, 2, 5, 5).double(), torch.randint(3, (4,))
    la = Laplace(Upsampled(**options).double().eval()).fit_batches([(x, y)])
    is_that_of_dense_jacobians(la, x)


# ------------------------------------------------------------------------- batches and masks


class Centred(Mlp):
    """Takes the batch's mean off its inputs: an example's outputs are not its own."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_a_model_that_mixes_the_examples_is_refused(curvature):
    with pytest.raises(ValueError, match="mixes the examples"):
        Laplace(Centred().eval(), curvature=curvature).fit_batches([examples()])


def test_a_random_model_is_told_from_one_that_mixes():
    with pytest.raises(ValueError, match="draws random numbers"):
        Laplace(Mlp(F.dropout).eval()).fit_batches([examples()])


class Masked(nn.Module):
    """Self-attention under the mask that torch makes, −Inf above the diagonal."""

    def __init__(self):
        super().__init__()
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        self.register_buffer("mask", mask)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        mixed, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)
        return self.head(mixed.mean(1))


def test_a_mask_of_minus_infinity_is_no_damage():
    model = Masked().double().eval()
    x = torch.randn(6, 5, 4).double()
    la = Laplace(model, params="last_layer").fit_batches([(x, torch.randint(3, (6,)))])
    J = flat_jacobian(model, x[:2], la.param_names)
    expected = J @ la.posterior.covariance.to_dense() @ J.mT
    torch.testing.assert_close(la.functional(x[:2])[1], expected)
    for damage in (torch.nan, torch.inf):
        model.mask[0, 0] = damage
        with pytest.raises(ValueError, match="mask holds NaN or Inf"):
            Laplace(model)


def test_an_embedding_alone_predicts():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)).double().eval()
    x = torch.randint(7, (5, 3))
    la = Laplace(model, params=["0.weight"]).fit_batches([(x, torch.randint(3, (5,)))])
    J = flat_jacobian(model, x[:2], la.param_names)
    expected = J @ la.posterior.covariance.to_dense() @ J.mT
    torch.testing.assert_close(la.functional(x[:2])[1], expected)


# ----------------------------------------------------------------------- the state of the model


@pytest.fixture
def normalised():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).eval()


def scaled(model):
    with torch.no_grad():
        model[0].weight.mul_(-3)
    return r"0\.weight"


def scaled_behind_autograd(model):
    model[0].weight.data.mul_(-3)
    return r"0\.weight"


def new_statistics(model):
    model[1].running_mean += 1
    return r"1\.running_mean"


@pytest.mark.parametrize("change", [scaled, scaled_behind_autograd, new_statistics])
def test_what_is_not_bayesian_must_stay_too(normalised, change, tmp_path):
    x, y = examples()
    la = Laplace(normalised, params="last_layer").fit_batches([(x, y)])
    la.save(tmp_path / "posterior.safetensors")
    la.predict(x)
    Laplace.load(tmp_path / "posterior.safetensors", normalised).predict(x)
    name = change(normalised)
    for use in (la.predict, la.functional):
        with pytest.raises(RuntimeError, match=f"{name} has changed since the fit"):
            use(x)
    with pytest.raises(ValueError, match=f"{name} is not that of the fit"):
        Laplace.load(tmp_path / "posterior.safetensors", normalised)


def test_a_fingerprint_tells_any_change_and_nothing_else(normalised):
    before = fingerprint(normalised, ["3.weight"])
    assert "3.weight" not in before
    normalised.register_buffer("cache", torch.zeros(3), persistent=False)
    assert changed(before, fingerprint(normalised, ["3.weight"])) == []
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex128):
        normalised.register_buffer("extra", torch.zeros(3, dtype=dtype))
        there = fingerprint(normalised, ["3.weight"])
        assert changed(before, there) == ["extra"]
        normalised.extra[1] = 1
        assert changed(there, fingerprint(normalised, ["3.weight"])) == ["extra"]
        del normalised.extra


def test_autocast_is_refused():
    x, y = examples()
    la = Laplace(Mlp().eval())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        la.fit_batches([(x, y)])
    la.fit_batches([(x, y)])
    for method in ("glm", "glm-mc", "nn", "map"):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
            la.predict(x, method)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert la.predict(x).probs.dtype == torch.float32


# ------------------------------------------------------------------------------- the interface


def test_cross_fitting_leaves_the_diagonal_as_it_is(tmp_path):
    x, y = examples()
    model = Mlp().eval()
    whole, crossfit = (
        Laplace(model, curvature="diag").fit_batches([(x, y)], folds=folds) for folds in (None, 5)
    )
    precision = crossfit.posterior.precision.to_dense()
    assert torch.equal(precision, precision.diagonal().diag())
    torch.testing.assert_close(precision, whole.posterior.precision.to_dense())
    crossfit.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    torch.testing.assert_close(loaded.predict(x).probs, crossfit.predict(x).probs)
    with pytest.raises(ValueError, match="2 to 12 folds"):
        crossfit.fit_batches([(x, y)], folds=13)


def test_a_loaded_low_rank_posterior_fits_again_at_the_rank_asked_for(tmp_path):
    x, y = examples()
    model = Mlp().eval()
    la = Laplace(model, curvature="lowrank", rank=9).fit_batches([(x[:2], y[:2])])
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    torch.testing.assert_close(loaded.predict(x).probs, la.predict(x).probs)
    again = loaded.fit_batches([(x, y)]).posterior.curvature.blocks
    (block,) = again.values()
    assert block.U.shape[1] == 9


def test_batches_that_the_user_makes_tell_the_number_of_examples():
    data = TensorDataset(*examples(32))
    some = BatchSampler(SubsetRandomSampler(range(8)), 4, drop_last=False)
    loader = DataLoader(data, batch_sampler=some)
    assert Laplace(Mlp().eval()).fit(loader).num_data == 8
    lists = DataLoader(data, batch_sampler=[[0, 1, 2], [3, 4]])
    assert Laplace(Mlp().eval()).fit(lists).num_data == 5
    assert Laplace(Mlp().eval()).fit(lists, mode="mini").num_data == 5
    batches = DataLoader([data[:4], data[4:6]], batch_size=None)
    assert Laplace(Mlp().eval()).fit(batches).num_data == 6
    with pytest.raises(ValueError, match="pass num_data="):
        Laplace(Mlp().eval()).fit(batches, mode="mini")


def test_grids_are_tensors_or_lists_and_keep_their_digits():
    x, y = examples()
    la = Laplace(Mlp().eval()).fit_batches([(x, y)])
    found = la.predict_grid(x, [0.1, 3.0])
    for predictive, delta in zip(found, (0.1, 3.0), strict=True):
        la.prior_precision = delta
        torch.testing.assert_close(predictive.probs, la.predict(x).probs)
    tried = la.tune([(x, y)], grid=[0.1, 0.3]).table
    assert [row["prior_precision"] for row in tried] == [0.1, 0.3]
    for wrong in ([], torch.tensor([])):
        with pytest.raises(ValueError, match="no prior precision"):
            la.predict_grid(x, wrong)
    chosen = la.functional(x[:2], outputs=[[0], [2]])[0]
    torch.testing.assert_close(chosen[:, 0], la.functional(x[:2])[0][[0, 1], [0, 2]])
