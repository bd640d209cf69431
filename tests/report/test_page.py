"""The page of a run folder as a file: its contents, what it leaves out, and wrong folders."""

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import a_run
import matplotlib
import numpy as np
import pandas as pd
import pytest
from a_run import shortened
from PIL import Image

from laplace_debias.report.page import write_page

MEGABYTE = 1_000_000


class ParsedPage(HTMLParser):
    """Elements, ids, addresses and texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.ids = []
        self.addresses = []
        self.handlers = []
        self.headings = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data", "poster"):
                self.addresses.append(value)
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_data(self, data):
        if self.tags[-1:] in (["h2"], ["h3"]) and data.strip():
            self.headings.append(data.strip())
        self.texts.append(data)


def written(folder):
    """Write the page of a folder, and read it."""
    return write_page(folder).read_text(encoding="utf-8")


def change(path, **changes):
    """Change entries of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")


@pytest.fixture(scope="module")
def page(page_of_images):
    return page_of_images.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_picture_is_a_file_and_in_the_page(page_of_images, page):
    folder = page_of_images.parent
    names = {path.stem for path in (folder / "pictures").iterdir()}
    # The first picture repeats one of those below.
    first, *below = re.findall(r'<figure [^>]*id="picture-([\w.-]+)"', page)
    assert sorted(below) == sorted(names)
    assert first.removeprefix("first-") in below
    for kind in ("reliability", "risk-coverage", "uncertainty", "severity"):
        assert any(name.startswith(kind) for name in names), kind
    assert {"sweep-laplace", "sweep-last-layer"} <= names
    for path in (folder / "pictures").iterdir():
        ElementTree.parse(path)  # a file that programs can read


def test_the_first_screen_is_verdict_picture_and_table(page):
    """They are in this order, and nothing comes before them."""
    texts = ["In short", "picture-first-", 'id="table"', 'id="differences"']
    positions = [page.index(text) for text in texts]
    assert positions == sorted(positions)
    assert page.index("<main") < positions[0]
    assert page.index("interval over the test") > page.index("<table")


def test_a_tables_columns_are_shown_by_name_and_unit(run_of_rows, tmp_path):
    folder = shortened(run_of_rows, tmp_path / "run")
    meta = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(meta | {"target": "price <EUR>"}))
    examples = json.loads((folder / "examples.json").read_text())
    for entry in examples["most_confidently_wrong"]:
        entry["columns"] = {"area <m2>": 123.4, "rooms": 3.0}
    (folder / "examples.json").write_text(json.dumps(examples))
    text = written(folder)
    assert '<span class="quiet">area &lt;m2&gt;</span> 123' in text
    assert '<span class="quiet">price &lt;EUR&gt;</span>' in text
    assert "units of price &lt;EUR&gt;" in text
    assert "units of the target" not in text


def test_ids_are_unique_and_what_refers_to_them_finds_them(page):
    parsed = ParsedPage(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    inner = {address[1:] for address in parsed.addresses if address.startswith("#")}
    inner |= set(re.findall(r"url\(#([^)]+)\)", page))
    inner |= set(re.findall(r'aria-(?:describedby|labelledby)="([^"]+)"', page))
    assert inner <= set(parsed.ids)
    assert any(name.startswith("severity-nll-") for name in inner)


def test_nothing_is_asked_for_from_outside(page):
    parsed = ParsedPage(page)
    outside = [a for a in parsed.addresses if not a.startswith(("#", "data:"))]
    assert outside == []
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) == {"#"}
    assert parsed.handlers == []
    assert "default-src 'none'" in page


def test_names_of_others_are_text(page):
    assert a_run.CLASSES[-1] not in page
    assert "&lt;script&gt;alert(&#39;elk&#39;)&lt;/script&gt;" in page
    # The page's own scripts: the data of each picture, and one with code.
    assert page.count("<script>") == 1


def test_names_of_methods_are_text_in_pictures_too(run_of_images, tmp_path):
    folder = shortened(run_of_images, tmp_path / "run", shifts=False, posterior=False)
    meta = json.loads((folder / "run.json").read_text())
    label = "</script><b onclick='x'>$x_1$ & </svg>"
    meta["title"] = label
    meta["methods"][0]["label"] = label
    meta["conclusion"] = [label]
    (folder / "run.json").write_text(json.dumps(meta))
    text = written(folder)
    assert label not in text
    assert "<b onclick" not in text
    assert text.count("</script>") == text.count("<script")
    for path in (folder / "pictures").iterdir():
        ElementTree.parse(path)
    # Dollars are not read as mathematics.
    assert "$x_1$" in (folder / "pictures" / "uncertainty-static.svg").read_text()


def test_colours_are_those_of_the_theme(page):
    body = page[page.index("<body") :]
    assert "var(--blue, #0072b2)" in body.lower()
    bare = re.findall(r"(?<!, )#[0-9a-fA-F]{6}\b", body)
    assert bare == []
    named = set(re.findall(r"var\(--([\w-]+)", body))
    styles = page[page.index("<style>") : page.index("</style>")]
    for name in named:
        assert len(re.findall(rf"--{name}: #", styles)) == 3, name  # light, dark, dark by system
    # The default colour of SVG is black, which would be invisible in the dark mode.
    texts = re.findall(r"<text ([^>]*)>", body)
    assert all("fill: var(--ink" in text for text in texts)
    assert len(texts) > 200


def test_every_group_of_pictures_says_how_to_read_it(page):
    for figure in re.findall(r"<figure ([^>]*)>", page):
        [line] = re.findall(r'aria-describedby="([^"]+)"', figure)
        [text] = re.findall(rf'<p class="reads" id="{line}">([^<]+)</p>', page)
        assert len(text) > 40
    labels = re.findall(r'<svg [^>]*role="img" aria-label="([^"]+)"', page)
    assert len(labels) == page.count("<figure ")
    assert len(set(labels)) == len(labels)


@pytest.mark.slow
def test_the_same_folder_gives_the_same_page_and_matplotlib_is_left_as_it_was(page_of_images, page):
    folder = page_of_images.parent
    pictures = {path: path.read_bytes() for path in (folder / "pictures").iterdir()}
    settings = dict(matplotlib.rcParams)
    assert written(folder) == page
    assert {path: path.read_bytes() for path in (folder / "pictures").iterdir()} == pictures
    assert dict(matplotlib.rcParams) == settings


@pytest.mark.slow
def test_large_pictures_are_made_smaller(run_of_images, tmp_path):
    folder = shortened(run_of_images, tmp_path / "run", shifts=False, ood=False, posterior=False)
    rng = np.random.default_rng(0)
    for path in (folder / "examples").iterdir():
        Image.fromarray(rng.integers(256, size=(300, 300, 3), dtype=np.uint8)).save(path)
    large = sum(path.stat().st_size for path in (folder / "examples").iterdir())
    assert large > 5 * MEGABYTE  # otherwise the test would show nothing
    assert len(written(folder)) < 5 * MEGABYTE


def test_a_small_run_has_no_empty_frames(run_of_images, tmp_path):
    text = written(
        shortened(
            run_of_images,
            tmp_path / "run",
            shifts=False,
            ood=False,
            posterior=False,
            pictures=False,
        )
    )
    for key in ("ood", "shift", "tuning"):
        assert f'id="{key}"' not in text
    assert 'id="calibration"' in text
    assert "<img" not in text
    assert "−1.25" in text  # the inputs of the examples
    assert not re.search(r'<div class="grid[^>]*>\s*</div>', text)
    assert not re.search(r"<tbody>\s*</tbody>", text)


def test_a_regression_has_intervals_and_residuals(run_of_rows, tmp_path):
    folder = shortened(run_of_rows, tmp_path / "run")
    text = written(folder)
    names = {path.stem for path in (folder / "pictures").iterdir()}
    assert {"coverage", "residuals", "sweep-laplace"} <= names
    assert not any(name.startswith(("reliability", "risk")) for name in names)
    assert " ± " in text
    assert "the class" not in text


def test_a_method_that_predicts_some_examples_says_so(run_of_images, tmp_path):
    folder = shortened(run_of_images, tmp_path / "run", shifts=False, ood=False, posterior=False)
    path = folder / "predictions" / "temperature" / "test.parquet"
    pd.read_parquet(path).iloc[::4].to_parquet(path)
    text = written(folder)
    assert text.count("50 of 200") == 1


def test_what_is_not_there_is_left_out(run_of_images, tmp_path):
    folder = shortened(run_of_images, tmp_path / "run", shifts=False)
    for path in (folder / "predictions" / "laplace").iterdir():
        path.unlink()
    for name in ("examples.json", "config.yaml", "sweeps/laplace.json"):
        (folder / name).unlink()
    meta = json.loads((folder / "run.json").read_text())
    required_keys = ("format", "status", "title", "task", "methods", "sets")
    (folder / "run.json").write_text(json.dumps({key: meta[key] for key in required_keys}))
    text = written(folder)
    assert 'id="examples"' not in text
    assert "To repeat it" not in text
    assert "In short" not in text
    assert "picture-reliability-test-laplace" not in text
    assert "picture-sweep-last-layer" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda f: (f / "run.json").unlink(), FileNotFoundError, "is not a run folder"),
        (lambda f: (f / "metrics.json").unlink(), FileNotFoundError, "has no metrics.json"),
        (lambda f: (f / "run.json").write_text('{"format": 1,'), ValueError, "run.json is damaged"),
        (
            lambda f: (f / "run.json").write_text("[1]"),
            ValueError,
            "run.json is damaged (it is not a JSON object)",
        ),
        (lambda f: change(f / "run.json", format=7), ValueError, "has format 7"),
        (lambda f: change(f / "run.json", status="running"), ValueError, "not complete"),
        (lambda f: change(f / "run.json", methods=[]), ValueError, "it has no methods"),
        (
            lambda f: change(f / "run.json", methods=[{"key": "../a", "label": "A"}]),
            ValueError,
            "the name '../a'",
        ),
        (
            lambda f: change(f / "run.json", sets=[{"name": "t", "role": "ood"}]),
            ValueError,
            "no data set whose role",
        ),
        (lambda f: change(f / "metrics.json", rows=3), ValueError, "metrics.json is damaged"),
        (
            lambda f: (f / "predictions/network/test.parquet").write_bytes(b"PAR1 no"),
            ValueError,
            "test.parquet is damaged",
        ),
        (lambda f: (f / "sweeps/laplace.json").write_text("{"), ValueError, "json is damaged"),
        (
            lambda f: min((f / "examples").iterdir()).write_bytes(b"no"),
            ValueError,
            ".png is not a readable picture",
        ),
    ],
)
def test_damaged_folders_are_refused_with_what_to_do(
    run_of_images, tmp_path, spoil, error, message
):
    folder = shortened(run_of_images, tmp_path / "run", shifts=False, ood=False)
    spoil(folder)
    with pytest.raises(error, match=re.escape(message)) as caught:
        write_page(folder)
    assert re.search(
        r"run the report again|`laplace-debias report|Use the version of", str(caught.value)
    )
    assert not (folder / "report.html").exists()


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        write_page(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_the_page_of_labels_that_apply_or_not(tmp_path, task):
    folder = a_run.make_run(tmp_path / "run", task)
    text = written(folder)
    sentence = json.loads((folder / "run.json").read_text())["conclusion"][0]
    assert sentence[:40] in html.unescape(text).replace("\u00a0", " ")
    assert 'id="ood"' in text
    assert 'id="examples"' in text
    assert ('id="calibration"' in text) == (task != "multilabel")
    names = set(re.findall(r'id="picture-([\w.-]+)"', text))
    assert {"sweep-last-layer", "sweep-laplace"} <= names
