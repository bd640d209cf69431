"""The tests under other arithmetic, one setting after the other: `make test-arithmetic`.

What a processor with fewer instructions, another number of threads or a LAPACK that fails does to
the numbers is not to be left to whoever has such a machine. Every setting runs the tests of
`make test` in processes of their own and gets one line; the exit status is 1 if any failed.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = (
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"MKL_CBWR": "COMPATIBLE"},
    # All three as on a processor that has AVX2 and no more.
    {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    # One eigendecomposition in ten fails; see `faulty_eigh.py`.
    {"LAPLACE_DEBIAS_FAULTY_EIGH": "nan"},
    {"LAPLACE_DEBIAS_FAULTY_EIGH": "raise"},
)
PROBE = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"


def name_of(setting):
    return " ".join(f"{variable}={value}" for variable, value in setting.items())


def environment_of(setting):
    """The variables of a run: those of the setting, and none of the other settings'."""
    known = {variable for other in SETTINGS for variable in other}
    environment = {key: value for key, value in os.environ.items() if key not in known}
    environment |= {"OMP_NUM_THREADS": "1"} | setting
    processes = max(1, (os.cpu_count() or 1) // int(environment["OMP_NUM_THREADS"]))
    environment.setdefault("PYTEST_XDIST_AUTO_NUM_WORKERS", str(processes))
    return environment


def run(setting, folder, arguments):
    """One line on the screen, all of the output in a file; whether every test passed."""
    environment = environment_of(setting)
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
    )
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal"]
    command += ["-m", "not slow", *arguments]
    began = time.monotonic()
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    log = folder / (re.sub(r"\W+", "-", name_of(setting)) + ".log")
    log.write_text(result.stdout, encoding="utf-8")
    counts = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", result.stdout, re.MULTILINE)
    told = counts[-1] if counts else f"no result, exit status {result.returncode}"
    instructions, threads = probe.stdout.split()
    print(
        f"{name_of(setting)} ({instructions}, threads: {threads}): {told}; {seconds:.0f} s",
        flush=True,
    )
    if result.returncode != 0:
        for line in re.findall(r"^(?:FAILED|ERROR) .*", result.stdout, re.MULTILINE):
            print(f"    {line}")
        print(f"    everything it printed: {log}", flush=True)
    return result.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other arguments go to pytest.")
    parser.add_argument("--only", metavar="TEXT", help="settings whose name contains this text")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "arithmetic")
    options, arguments = parser.parse_known_args()
    chosen = [setting for setting in SETTINGS if (options.only or "") in name_of(setting)]
    if not chosen:
        parser.error(f"no setting contains {options.only!r}: {[*map(name_of, SETTINGS)]}")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = [setting for setting in chosen if not run(setting, options.output, arguments)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} settings passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
