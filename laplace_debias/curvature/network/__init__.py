"""The network: its inputs, its parameters and its outputs."""
