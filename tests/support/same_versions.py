"""Compare the results of two versions of the package on one machine, to the last bit.

Run `git worktree add ../base REVISION`, then `python tests/support/same_versions.py ../base`. Each
version computes the records of its own `same_numbers.py`. Numbers that differ are listed with the
relative difference of a projection. Records that only one version has are listed at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPUTE = """
import fnmatch, json, pathlib, sys
import torch
import same_numbers
torch.set_num_threads(1)
names = [name for name in same_numbers.records() if fnmatch.fnmatch(name, sys.argv[2])]
records = {name: same_numbers.compute(name) for name in names}
pathlib.Path(sys.argv[1]).write_text(json.dumps(records))
"""


def compute_records(checkout, only, path):
    """Compute the records of one version in a separate process."""
    folders = [str(checkout), str(checkout / "tests" / "support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", COMPUTE, str(path), only]
    subprocess.run(command, check=True, cwd=checkout, env=environment)
    return json.loads(path.read_text())


def differences(base_records, new_records):
    """Yield rows `(record, number, relative difference of the projections or None)`."""
    for name in base_records.keys() & new_records.keys():
        for key in base_records[name].keys() & new_records[name].keys():
            base_digest, base_projection = base_records[name][key]
            new_digest, new_projection = new_records[name][key]
            if base_digest != new_digest:
                difference = None
                if base_projection is not None and new_projection is not None:
                    scale = max(abs(base_projection), 1e-300)
                    difference = abs(new_projection - base_projection) / scale
                yield name, key, difference


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="a checkout of the other version")
    parser.add_argument(
        "--only", default="*", help="records to compare, as a pattern: 'kfac full*'"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base_path = Path(folder) / "base.json"
        new_path = Path(folder) / "new.json"
        base_records = compute_records(arguments.base.resolve(), arguments.only, base_path)
        new_records = compute_records(ROOT, arguments.only, new_path)
    rows = sorted(differences(base_records, new_records), key=lambda row: row[:2])
    for name, key, difference in rows:
        print(f"{name} | {key} | {'not compared' if difference is None else f'{difference:.1e}'}")
    common_names = base_records.keys() & new_records.keys()
    num_numbers = sum(
        len(base_records[name].keys() & new_records[name].keys()) for name in common_names
    )
    print(f"{len(common_names)} records, {num_numbers} numbers, {len(rows)} differ.")
    print("By number:", dict(Counter(key for _, key, _ in rows)))
    print("In one version alone:", sorted(base_records.keys() ^ new_records.keys()))
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
