"""The synthetic plugin."""
