"""The structures of operators, one per file, each with its arithmetic."""
