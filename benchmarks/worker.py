"""One comparison in a process of its own: `python -m benchmarks.worker NAME SETTINGS FILE`."""

import importlib
import json
import sys
import warnings
from pathlib import Path

from benchmarks import results
from benchmarks.settings import Settings


def main(name: str, settings_json: str, path: str) -> None:
    """Measure a comparison and write its result.

    Args:
        name: The comparison's module.
        settings_json: The settings' fields.
        path: The file to write.
    """
    # What peers announce about their own dependencies.
    warnings.filterwarnings("ignore")
    settings = Settings(**json.loads(settings_json))
    settings.start()
    module = importlib.import_module(f"benchmarks.{name}")
    results.write(Path(path), results.measured(settings, module.compare(settings)))


if __name__ == "__main__":
    main(*sys.argv[1:])
