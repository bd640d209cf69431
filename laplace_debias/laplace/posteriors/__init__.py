"""Posteriors and priors over the parameters."""
