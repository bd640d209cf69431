"""Tables and pictures from results. Needs the extra `cli`, and knows no model."""
