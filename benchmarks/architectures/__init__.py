"""Architectures of other libraries: does the default work, what does it cover, what does it cost."""
