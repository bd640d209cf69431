"""A posterior as a web service: a torch.export program behind an endpoint, and a client.

The posterior is exported once. The server needs torch and the file, but neither this package nor
the code of the network. A client sends images and receives probabilities with their uncertainty.
The answers are compared with `la.predict`.

Run with `python examples/serving.py`; `--port 8000 --forever` keeps the server running.
"""

import argparse
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace

NUM_PIXELS = 64
Program = Callable[[Tensor], dict[str, Tensor]]


# ------------------------------------------------- the server: only torch and the standard library


class Endpoint(BaseHTTPRequestHandler):
    """Answers `POST /predict` with the program's outputs, as JSON."""

    def __init__(self, program: Program, *arguments: Any) -> None:
        self.program = program
        super().__init__(*arguments)

    def do_POST(self) -> None:
        """Predict for the images of a request, `{"images": [[64 numbers], ...]}`."""
        if self.path != "/predict":
            self.reply(404, {"error": f"There is no {self.path}. Use /predict."})
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            images = torch.tensor(json.loads(body)["images"], dtype=torch.float32)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            self.reply(400, {"error": f'Send {{"images": [...]}} as JSON ({error}).'})
            return
        if images.ndim != 2 or images.shape[1] != NUM_PIXELS or not images.isfinite().all():
            message = f"Send finite images of {NUM_PIXELS} pixels, got shape {list(images.shape)}."
            self.reply(400, {"error": message})
            return
        with torch.no_grad():
            answers = self.program(images)
        self.reply(200, {name: answer.tolist() for name, answer in answers.items()})

    def reply(self, status: int, content: dict[str, Any]) -> None:
        """Send a JSON object."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing for each request."""


@contextmanager
def serving(path: Path, port: int = 0) -> Iterator[int]:
    """Serve an exported posterior on the loopback interface within the block; yield the port."""
    program = torch.export.load(path).module()
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Endpoint, program))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ------------------------------------------------- the client


def request(port: int, content: Any, path: str = "/predict") -> tuple[int, dict[str, Any]]:
    """Send a request; return the status and the answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, json.dumps(content))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


# ------------------------------------------------- the posterior


def fit_posterior(epochs: int) -> tuple[Laplace, Tensor]:
    """Train a small network on digits, and fit its last layer; return the fit and test images."""
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(digits))
    train, validation, test = torch.utils.data.random_split(dataset, [600, 400, len(digits) - 1000])
    model = nn.Sequential(nn.Linear(NUM_PIXELS, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(train, batch_size=100, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    la = Laplace(model.eval(), params="last_layer").fit(loader)
    la.tune(DataLoader(validation, batch_size=100))
    return la, torch.stack([x for x, _ in test])


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Export, serve and request; return the largest differences from `la.predict`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training data")
    parser.add_argument("--port", type=int, default=0, help="port; 0 for one that is free")
    parser.add_argument("--forever", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--program", type=Path, default=Path("results/predictive.pt2"))
    options = parser.parse_args(arguments)
    la, images = fit_posterior(options.epochs)
    options.program.parent.mkdir(parents=True, exist_ok=True)
    la.export(options.program, images[:2])
    with serving(options.program, options.port) as port:
        print(f"Serving on http://127.0.0.1:{port}/predict")
        differences = {"probs": 0.0, "variance": 0.0}
        for batch in images.split(100):
            _, answer = request(port, {"images": batch.tolist()})
            _, covariance = la.functional(batch)
            expected = {
                "probs": la.predict(batch).probs,
                "variance": covariance.diagonal(dim1=1, dim2=2),
            }
            for name, values in expected.items():
                difference = float((torch.tensor(answer[name]) - values).abs().max())
                differences[name] = max(differences[name], difference)
        status, answer = request(port, {"images": [[1.0, 2.0]]})
        print(f"A wrong request: {status}, {answer['error']}")
        if options.forever:
            threading.Event().wait()
    for name, difference in differences.items():
        print(f"Largest difference of the {name} from la's: {difference:.1e}")
    return differences


if __name__ == "__main__":
    main()
