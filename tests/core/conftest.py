"""Hypothesis without its wall-clock limit per example: a busy machine is no finding."""

from hypothesis import settings

settings.register_profile("tokenflow", deadline=None)
settings.load_profile("tokenflow")
