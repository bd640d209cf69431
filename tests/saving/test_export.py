"""Exported predictives, run in a process that cannot import the package."""

import warnings

import conformance
import pytest
import torch
from programs import answers_alone
from torch import nn

from laplace_debias import Categorical, Laplace
from laplace_debias.laplace.saving import export as exporting

DELTA = 0.7
NUM_DATA = 30


class Named(nn.Module):
    """Two inputs by name, and outputs at every position."""

    def __init__(self, num_outputs):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, num_outputs)

    def forward(self, tokens, mask):
        return self.head(torch.tanh(self.mix(self.embed(tokens))) * mask.unsqueeze(-1))


class Pair(nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.head = nn.Linear(4, num_outputs, bias=False)

    def forward(self, a, b, negate=False):
        h = torch.relu(self.hidden(a)) + b
        return self.head(-h if negate else h)


def convolutional(num_outputs):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(12, num_outputs),
    )  # fmt: skip


def plain(num_outputs):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, num_outputs))


def images(n, g):
    return torch.randn(n, 1, 4, 4, generator=g, dtype=torch.float64)


def vectors(n, g):
    return torch.randn(n, 3, generator=g, dtype=torch.float64)


def pair(n, g):
    return vectors(n, g), torch.randn(n, 4, generator=g, dtype=torch.float64)


def named(n, g):
    mask = (torch.rand(n, 5, generator=g) < 0.7).double()
    return {"tokens": torch.randint(6, (n, 5), generator=g), "mask": mask}


def targets(likelihood, shape, g):
    if likelihood == "classification":
        return torch.randint(3, shape, generator=g)
    if likelihood == "regression":
        return torch.randn(*shape, 2, generator=g, dtype=torch.float64)
    if likelihood == "multilabel":
        shape = (*shape, 3)
    return torch.randint(2, shape, generator=g).double()


OUTPUTS = {"classification": 3, "regression": 2, "binary": 1, "multilabel": 3}


class Case:
    """A fit, the options of its export, and batches of inputs of several sizes."""

    def __init__(self, build, inputs, likelihood="classification", export=(), **options):
        self.likelihood = likelihood
        self.export = dict(export)
        g = torch.Generator().manual_seed(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = build(OUTPUTS[likelihood]).double().eval()
        positions = (5,) if inputs is named else ()
        data = [(inputs(6, g), targets(likelihood, (6, *positions), g)) for _ in range(2)]
        self.batches = {n: inputs(n, g) for n in (1, 2, 7)}
        self.sigma = [0.5, 2.0] if likelihood == "regression" else None
        # As many columns of curvature as there may be, for small tables.
        options = {"params": "last_layer", "prior_precision": DELTA, **options}
        self.la = Laplace(self.model, likelihood, sigma=self.sigma, **options)
        self.la.fit_batches(data, num_data=NUM_DATA)

    def write(self, path):
        self.la.export(path, self.batches[1], **self.export)

    def expected(self, x):
        """The outputs of `predict`, which other tests compare with dense Jacobians."""
        link = self.export.get("link")
        predictive = self.la.predict(x, link=link)
        if self.likelihood == "regression":
            covariance = predictive.covariance_matrix
            variance = covariance.diagonal(dim1=-2, dim2=-1)
            return {"mean": predictive.mean, "variance": variance, "covariance": covariance}
        mean, variance = self.la.functional(x, diagonal=True)
        probs = predictive.mean if self.likelihood == "multilabel" else predictive.probs
        return {"logits": mean, "variance": variance, "probs": probs}


CASES = {
    "images, one δ a block, cold": lambda: Case(
        convolutional, images, prior_precision=torch.tensor([0.2, 3.0]), temperature=0.3
    ),
    "binary, ekfac": lambda: Case(plain, vectors, "binary", curvature="ekfac"),
    "two inputs": lambda: Case(Pair, pair, "multilabel"),
    "without bias, diag": lambda: Case(Pair, pair, "regression", curvature="diag"),
    "with a bias, diag": lambda: Case(plain, vectors, "regression", curvature="diag"),
    "joint": lambda: Case(plain, vectors, "regression", joint=True),
    "named inputs, probit": lambda: Case(Named, named, export={"link": "probit"}),
    "regression at positions": lambda: Case(Named, named, "regression"),
}


@pytest.fixture(scope="module")
def served(processes, tmp_path_factory):
    """Every case, and the answers of its program in another process."""
    folder = tmp_path_factory.mktemp("served")
    cases = {name: case() for name, case in CASES.items()}
    programs = {}
    for index, (name, case) in enumerate(cases.items()):
        path = folder / f"{index}.pt2"
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of views in the file
            case.write(path)
        programs[name] = (path, case.batches)
    processes.start(1, answers_alone, programs, has_group=False)
    return cases, processes.result(0)


@pytest.mark.parametrize("name", CASES)
def test_a_program_alone_answers_as_predict(served, name):
    cases, answers = served
    case = cases[name]
    assert isinstance(answers, dict), answers
    for size, x in case.batches.items():
        expected = case.expected(x)
        outputs = answers[name, size]
        assert list(outputs) == list(expected)
        for key, value in expected.items():
            assert outputs[key].shape == value.shape, key
            assert (outputs[key] - value).abs().max() <= 1e-6 * value.abs().max(), key


def test_the_example_may_hold_any_number_and_the_model_stays_as_it_was(tmp_path):
    case = Case(convolutional, images)
    fingerprint = conformance.fingerprint(case.model)
    for size, x in case.batches.items():
        case.la.export(tmp_path / f"{size}.pt2", x)
        program = torch.export.load(tmp_path / f"{size}.pt2").module()
        for y in case.batches.values():
            torch.testing.assert_close(program(y)["probs"], case.la.predict(y).probs)
    assert conformance.is_same(fingerprint, conformance.fingerprint(case.model))


def test_single_precision_is_within_a_millionth(tmp_path):
    torch.manual_seed(0)
    model = plain(3).eval()
    x = torch.randn(20, 3)
    y = torch.randint(3, (20,))
    la = Laplace(model, params="last_layer").fit_batches([(x, y)])
    la.export(tmp_path / "predictive.pt2", x)
    program = torch.export.load(tmp_path / "predictive.pt2").module()
    probs = program(x)["probs"]
    assert probs.dtype == torch.float32
    assert (probs - la.predict(x).probs).abs().max() <= 1e-6


class ByValue(nn.Module):
    """A network whose forward pass depends on the value of a tensor, which cannot be traced."""

    def __init__(self, num_outputs):
        super().__init__()
        self.head = nn.Linear(3, num_outputs)

    def forward(self, x):
        return self.head(x if float(x.sum()) > -1e9 else -x)


def test_a_model_that_torch_cannot_trace_is_told_and_the_old_file_stays(tmp_path):
    path = tmp_path / "predictive.pt2"
    path.write_bytes(b"before")
    case = Case(plain, vectors)
    case.model = ByValue(3).double().eval()
    x = case.batches[7]
    la = Laplace(case.model, params="last_layer")
    la.fit_batches([(x, torch.zeros(7, dtype=torch.long))])
    with pytest.raises(NotImplementedError, match="cannot trace"):
        la.export(path, x)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("predictive.pt2", b"before")]


def test_a_program_that_gives_other_numbers_is_not_written(tmp_path, monkeypatch):
    case = Case(plain, vectors)
    right = exporting._Predictive.predict

    def wrong(*args):
        return {name: value + 1e-5 for name, value in right(*args).items()}

    monkeypatch.setattr(exporting._Predictive, "predict", wrong)
    with pytest.raises(RuntimeError, match=r"the exported program and .* differ in probs by 1e-05"):
        case.la.export(tmp_path / "predictive.pt2", case.batches[7])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"link": "logit"}, ValueError, "Unknown link"),
        ({"link": "exact"}, NotImplementedError, 'Use `link="pairwise"'),
        ({"path": "predictive.pt"}, ValueError, r"suffix '\.pt'. Use .* ends with \.pt2"),
        (
            {"path": "nowhere/predictive.pt2"},
            FileNotFoundError,
            "nowhere does not exist. Create it",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, error, message, tmp_path):
    case = Case(plain, vectors)
    path = tmp_path / options.get("path", "predictive.pt2")
    options = {key: value for key, value in options.items() if key != "path"}
    with pytest.raises(error, match=message):
        case.la.export(path, case.batches[1], **options)
    assert not list(tmp_path.iterdir())


class Scaled(nn.Module):
    """A network that changes the outputs of its last layer."""

    def __init__(self, num_outputs):
        super().__init__()
        self.head = nn.Linear(3, num_outputs)

    def forward(self, x):
        return 2 * self.head(x)


@pytest.mark.parametrize(
    ("build", "params", "message"),
    [
        (plain, "all", r"2 layers are Bayesian here: 0, 2\. .* and fit with `params="),
        (Scaled, "last_layer", "head is a Linear, or other operations follow"),
        (lambda C: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, C)),
         ["1.weight"], "1 is a LayerNorm, or other operations follow"),
    ],
)  # fmt: skip
def test_glm_of_other_layers_is_refused_with_what_to_do(build, params, message, tmp_path):
    case = Case(build, vectors, params=params)
    with pytest.raises(NotImplementedError, match=message):
        case.la.export(tmp_path / "predictive.pt2", case.batches[1])


def test_what_has_no_closed_form_or_no_tensors_is_refused_with_what_to_do(tmp_path):
    dense = Case(plain, vectors, curvature="full")
    with pytest.raises(NotImplementedError, match='with curvature "kfac", "ekfac" or "diag"'):
        dense.la.export(tmp_path / "predictive.pt2", dense.batches[1])
    flag = Case(Pair, lambda n, g: (*pair(n, g), True))
    with pytest.raises(NotImplementedError, match=r"takes only tensors.*None, a flag"):
        flag.la.export(tmp_path / "predictive.pt2", flag.batches[1])


class Own(Categorical):
    pass


def test_a_likelihood_of_a_users_class_is_refused(tmp_path):
    case = Case(plain, vectors)
    x = case.batches[7]
    la = Laplace(case.model, Own(), params="last_layer")
    la.fit_batches([(x, torch.zeros(7, dtype=torch.long))])
    with pytest.raises(
        NotImplementedError, match="predictive distribution of a Own cannot be exported"
    ):
        la.export(tmp_path / "predictive.pt2", x)
