"""Data: batches of inputs and targets, read from whatever a loader yields."""
