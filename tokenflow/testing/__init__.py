"""For those who write engines, sinks and tests: fakes, and the engine contract in executable form.

`tokenflow.testing.conformance.EngineConformance` is what every engine here passes. Nothing heavy is imported before
it is used, since pytest loads `tokenflow.testing.plugin` in every run.
"""
