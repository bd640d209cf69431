"""Files, memory, threads, processes and random generators."""
