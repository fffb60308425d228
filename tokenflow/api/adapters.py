"""Ways to an engine that are shorter than the whole contract."""
