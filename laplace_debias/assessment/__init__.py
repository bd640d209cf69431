"""Is a network's uncertainty any good: methods compared on its data, in a run folder."""
