"""Networks, their inputs, their parameters and their data."""
