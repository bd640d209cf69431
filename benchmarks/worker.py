"""One comparison in a separate process: `python -m benchmarks.worker NAME SETTINGS FILE`."""

import importlib
import json
import os
import resource
import sys
import warnings
from pathlib import Path

from benchmarks import results
from benchmarks.settings import Settings


def main(name: str, settings_json: str, path: str) -> None:
    """Measure a comparison and write its result.

    Args:
        name: The module of the comparison.
        settings_json: The fields of the settings, as JSON.
        path: The file to write.
    """
    # This hides warnings of peers about their own dependencies.
    warnings.filterwarnings("ignore")
    settings = Settings(**json.loads(settings_json))
    settings.start()
    if settings.device == "cpu":
        # A peer that needs more memory than the machine has fails, and the comparison continues.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = memory * 9 // 10
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    module = importlib.import_module(f"benchmarks.{name}")
    network = getattr(module, "NETWORK", settings.network)
    rows = module.compare(settings)
    results.write(Path(path), results.make_result(settings, network, rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
