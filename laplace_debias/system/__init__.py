"""Resources of the machine: threads, random generators, files."""
