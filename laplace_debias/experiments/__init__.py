"""One experiment a file: data → table → picture."""
