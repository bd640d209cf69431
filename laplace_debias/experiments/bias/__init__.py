"""The bias of mini-batch quadratics, direction by direction."""
