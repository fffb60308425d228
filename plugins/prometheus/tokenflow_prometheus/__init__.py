"""The prometheus plugin."""
