"""Save, load, publish and export a posterior."""
