"""State of a fit: the model, its parameters, the prior and the posterior."""
