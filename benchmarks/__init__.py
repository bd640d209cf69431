"""Speed and memory against named peers, side by side: `python -m benchmarks`."""
