"""The llamacpp plugin."""
