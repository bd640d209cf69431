"""One small run of each kind for all tests that only read it."""

import a_run
import pytest

from laplace_debias.assessment import assess


@pytest.fixture(scope="package")
def images():
    return a_run.loaded_images(num_test=80, num_ood=30, severities=(1, 5))


@pytest.fixture(scope="package")
def run_of_images(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "run"
    methods = a_run.methods_for(images)
    return assess(images, folder, methods, title="Stripes", config="")
