"""The pictures of the page: each from a run folder, None where the run has nothing to show."""
