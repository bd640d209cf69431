"""Choose the prior precision, the noise and the temperature."""
