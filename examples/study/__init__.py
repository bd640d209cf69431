"""The study: where a posterior is worth its cost, and where a temperature is enough."""
