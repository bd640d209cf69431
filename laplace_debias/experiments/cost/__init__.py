"""What the fits cost."""
