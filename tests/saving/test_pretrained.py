"""Posteriors in folders and in repositories of the Hugging Face Hub."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import nn

from laplace_debias import Laplace

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
BATCHES = [(X, torch.arange(60) % 2)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def fitted():
    return Laplace(network(), prior_precision=3.0).fit(BATCHES)


def test_a_folder_holds_the_posterior_and_a_card(tmp_path):
    la = fitted()
    report = la.evaluate(BATCHES)
    folder = tmp_path / "new" / "folder"
    la.save_pretrained(folder, evaluation=report)
    assert {path.name for path in folder.iterdir()} == {"README.md", "posterior.safetensors"}
    loaded = Laplace.from_pretrained(folder, network(), memory_bound=10_000_000)
    assert torch.equal(loaded.predict(X).probs, la.predict(X).probs)
    assert loaded.prior_precision == 3.0
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: laplace-debias\n")
    for name, value in report.items():
        ends = [f"{end:.4f}" if value.low == value.low else "–" for end in (value.low, value.high)]
        assert f"| {name} | {value.value:.4f} | {ends[0]} | {ends[1]} |" in card
    assert "| prior precision | 3 |" in card
    assert "| model | Sequential |" in card


def test_a_card_of_the_network_keeps_its_text(tmp_path):
    la = fitted()
    card = tmp_path / "README.md"
    card.write_text("# My network\n\nTrained on Mondays.\n", encoding="utf-8")
    la.save_pretrained(tmp_path)
    first = card.read_text(encoding="utf-8")
    assert first.startswith("# My network\n\nTrained on Mondays.\n\n")
    assert "not evaluated" in first
    la.prior_precision = 5.0
    card.write_text(first + "\nThe end.\n", encoding="utf-8")
    la.save_pretrained(tmp_path, evaluation=la.evaluate(BATCHES))
    second = card.read_text(encoding="utf-8")
    assert second.startswith("# My network\n\nTrained on Mondays.\n\n")
    assert second.endswith("\nThe end.\n")
    assert second.count("## Posterior") == 1
    assert "| prior precision | 5 |" in second
    assert "| accuracy |" in second


def test_no_card_is_written_without_one(tmp_path):
    fitted().save_pretrained(tmp_path, card=False)
    assert [path.name for path in tmp_path.iterdir()] == ["posterior.safetensors"]


def test_wrong_folders_and_arguments_are_rejected(tmp_path, unchecked):
    la = fitted()
    with pytest.raises(RuntimeError, match="not fitted"):
        Laplace(network()).save_pretrained(tmp_path / "a")
    with pytest.raises(TypeError, match="evaluation must be Report or None, got dict"):
        la.save_pretrained(tmp_path / "a", evaluation={"nll": 0.3})
    with pytest.raises(ValueError, match=r"no effect with `card=False`"):
        la.save_pretrained(tmp_path / "a", card=False, evaluation=la.evaluate(BATCHES))
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"is a file\. Pass the path of a folder"):
        la.save_pretrained(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"has no posterior.safetensors. Write it with"):
        Laplace.from_pretrained(tmp_path, network())
    with pytest.raises(
        FileNotFoundError, match=r"There is no folder .*, and this is not the name of a rep"
    ):
        Laplace.from_pretrained(tmp_path / "missing", network())
    with pytest.raises(FileNotFoundError, match="There is no folder missing, and this is not the"):
        Laplace.from_pretrained("missing", network())
    la.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"applies only to a repository, but .* is a folder\. Remove"
    ):
        Laplace.from_pretrained(tmp_path, network(), revision="main")
    with pytest.raises(ValueError, match="Load the checkpoint"):
        Laplace.from_pretrained(tmp_path, network().requires_grad_(True).apply(changed))


def changed(module):
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's interface that uploads and downloads of small files use."""

    def __init__(self, files, calls, *args):
        self.files = files
        self.calls = calls
        super().__init__(*args)

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self):
        self.calls.append(f"{self.command} {self.path}")
        name = self.path.partition("/me/net/resolve/main/")[2]
        if name in self.files:
            content = self.files[name]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(200, content, ETag=etag, X_Repo_Commit="0" * 40)
        elif name:
            self.answer(404, X_Error_Code="EntryNotFound")
        elif self.path.startswith("/api/models/me/net"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer_json({"id": "me/net", "sha": "0" * 40, "siblings": siblings})
        else:
            self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self):
        self.calls.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/repos/create":
            self.answer_json({"url": f"http://{self.headers['Host']}/me/net", "name": "me/net"})
        elif self.path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self.answer_json({"files": modes})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            url = f"http://{self.headers['Host']}/me/net/commit/{'0' * 40}"
            self.answer_json({"commitUrl": url, "commitOid": "0" * 40})
        else:
            self.answer(404)


PUSH_AND_READ = """
import sys
import torch
from test_pretrained import BATCHES, X, fitted, network
from laplace_debias import Laplace

la = fitted()
print(la.push_to_hub("me/net", evaluation=la.evaluate(BATCHES), token="hf_secret"))
again = Laplace.from_pretrained("me/net", network(), revision="main")
assert torch.equal(again.predict(X).probs, la.predict(X).probs)
for name, message in [("me/other", "no repository with"), ("a//b", "not the name of a repo")]:
    try:
        Laplace.from_pretrained(name, network())
    except FileNotFoundError as error:
        assert message in str(error), error
    else:
        raise AssertionError(name)
print("done")
"""


@pytest.mark.slow
def test_a_repository_of_a_stub_hub_holds_the_posterior(tmp_path):
    pytest.importorskip("huggingface_hub")
    files = {"README.md": b"# My network\n"}
    calls = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, files, calls))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    run = subprocess.run(
        [sys.executable, "-c", PUSH_AND_READ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    server.shutdown()
    server.server_close()
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[0].endswith("/me/net")
    assert sorted(files) == ["README.md", "posterior.safetensors"]
    card = files["README.md"].decode()
    assert card.startswith("# My network\n\n")
    assert "| accuracy |" in card
    local = tmp_path / "local.safetensors"
    fitted().save(local)
    assert files["posterior.safetensors"] == local.read_bytes()
    assert sum("/commit/" in call for call in calls) == 1


def test_the_hub_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for use in (
        lambda: Laplace.from_pretrained("me/net", network()),
        lambda: fitted().push_to_hub("me/net"),
    ):
        with pytest.raises(ImportError, match=r"pip install 'laplace-debias\[hub\]'"):
            use()
