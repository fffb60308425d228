"""Benchmarks: each prints one JSON object, and every figure is a ratio against something real in the same run."""
