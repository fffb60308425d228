"""The real scheduler of exllamav3 on a machine without a GPU.

extension   stands in for the compiled extension: what scheduling and sampling call of it
model       a model whose next token is a hash of what it reads back through the page table

What it proves is scheduling, pausing, cancelling, sampling and accounting. It proves nothing about kernels.
"""
