"""What the machine shares: threads, random generators, files."""
