"""Mean and covariance of the linearised network's outputs."""
