"""Compare what two versions compute, on one machine and to the last bit.

`git worktree add ../base REVISION`, then `python tests/support/same_versions.py ../base`: each
version computes the records of its own `same_numbers.py`. Names that only one of them has are
counted, and those that differ are listed with the relative difference of a projection.
"""

import argparse
import fnmatch
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
found = {name: same_numbers.compute(name) for name in names}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
"""


def computed(checkout, only, path):
    """The records of one version, in a process of its own."""
    places = [str(checkout), str(checkout / "tests" / "support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", COMPUTE, str(path), only]
    subprocess.run(command, check=True, cwd=checkout, env=environment)
    return json.loads(path.read_text())


def differences(before, after):
    """Rows `(record, number, relative difference of the projections or None)`."""
    for name in before.keys() & after.keys():
        for key in before[name].keys() & after[name].keys():
            (digest, projected), (other_digest, other) = before[name][key], after[name][key]
            if digest != other_digest:
                is_known = projected is not None and other is not None
                yield (
                    name,
                    key,
                    abs(other - projected) / max(abs(projected), 1e-300) if is_known else None,
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="a checkout of the other version")
    parser.add_argument(
        "--only", default="*", help="records to compare, as a pattern: 'kfac full*'"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = computed(arguments.base.resolve(), arguments.only, Path(folder) / "before.json")
        after = computed(ROOT, arguments.only, Path(folder) / "after.json")
    rows = sorted(differences(before, after), key=lambda row: row[:2])
    for name, key, difference in rows:
        print(f"{name} | {key} | {'not compared' if difference is None else f'{difference:.1e}'}")
    alone = {name for name in before.keys() ^ after.keys() if fnmatch.fnmatch(name, arguments.only)}
    num_numbers = sum(
        len(before[name].keys() & after[name].keys()) for name in before.keys() & after.keys()
    )
    print(
        f"{len(before.keys() & after.keys())} records, {num_numbers} numbers, {len(rows)} differ."
    )
    print("By number:", dict(Counter(key for _, key, _ in rows)))
    print("In one version alone:", sorted(alone))
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
