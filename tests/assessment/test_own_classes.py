"""A whole run with a user's likelihood of classes, which does not call its outputs logits."""

from dataclasses import replace

import a_run
import pytest
import torch
from torch.distributions import Categorical

from laplace_debias import Laplace, Likelihood
from laplace_debias.assessment import assess, default_methods
from laplace_debias.report.page import write_page
from laplace_debias.runs.folder import RunFolder


class OwnClasses(Likelihood):
    """A softmax with a probit approximation of its own."""

    targets = "class"

    def check(self, outputs, targets):
        if targets.shape != outputs.shape[:1]:
            raise ValueError("Pass one class per example.")

    def nll(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets.long(), reduction="none")

    def hessian_root(self, outputs):
        # Columns (e_k − p) √p_k, whose outer products add up to diag(p) − p pᵀ.
        p = outputs.softmax(-1)
        differences = torch.eye(p.shape[-1], dtype=p.dtype) - p.unsqueeze(-2)
        return (differences * p.sqrt().unsqueeze(-1)).movedim(-2, 0)

    def sample(self, outputs, uniforms):
        return (outputs.softmax(-1).cumsum(-1) < uniforms[:, :1]).sum(-1)

    def predictive(self, mean, covariance):
        if covariance is None:
            return Categorical(logits=mean)
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        return Categorical(logits=mean / (1 + torch.pi / 8 * variances).sqrt())

    def mixture(self, samples):
        return Categorical(probs=samples.softmax(-1).mean(0))


def test_classes_of_ones_own_are_assessed(tmp_path):
    loaded = a_run.loaded_images(num_test=60, num_ood=30, severities=(3,))
    loaded = replace(loaded, likelihood=OwnClasses())
    methods = default_methods(loaded)
    assert [method.key for method in methods] == ["network", "last-layer"]
    folder = RunFolder(assess(loaded, tmp_path / "run", methods))
    rows = {
        (row.method, row.metric): row.value
        for row in folder.read_measurements().rows
        if row.set_name == "test"
    }
    x = torch.cat([x for x, _ in loaded.test])
    y = torch.cat([y for _, y in loaded.test])
    with torch.no_grad():
        outputs = loaded.model(x).double()
    nll = torch.nn.functional.cross_entropy(outputs, y)
    assert rows["network", "nll"] == pytest.approx(nll.item(), rel=1e-6)
    accuracy = (outputs.argmax(1) == y).double().mean()
    assert rows["network", "accuracy"] == pytest.approx(accuracy.item())
    path = folder.posterior("last-layer")
    la = Laplace.load(path, loaded.model, likelihood=loaded.likelihood)
    log_prob = la.predict(x).log_prob(y).mean().item()
    assert rows["last-layer", "nll"] == pytest.approx(-log_prob, rel=1e-4)
    assert folder.read_record().target_kind == "class"
    columns = folder.read_predictions("last-layer", "test", "mutual_information")
    assert (columns["mutual_information"] >= -1e-6).all()
    assert columns["mutual_information"].max() > 1e-4
    assert "Are the probabilities right?" in write_page(folder.path).read_text(encoding="utf-8")
