"""One run of images and one of rows, of which tests take copies, and the page of the first."""

import a_run
import pytest

from laplace_debias.report.page import write_page


@pytest.fixture(scope="session")
def run_of_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "run"
    return a_run.make_run(folder, num_test=200, num_ood=200)


@pytest.fixture(scope="session")
def run_of_rows(tmp_path_factory):
    return a_run.make_run(tmp_path_factory.mktemp("rows") / "run", "regression", num_test=200)


@pytest.fixture(scope="session")
def page_of_images(run_of_images, tmp_path_factory):
    return write_page(a_run.shortened(run_of_images, tmp_path_factory.mktemp("page") / "run"))
