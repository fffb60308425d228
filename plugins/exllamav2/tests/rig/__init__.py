"""exllamav2's own scheduler, jobs and pages on a CPU: what they need below them, in Python.

extension   what the compiled extension does where scheduling and sampling call it
library     the import of exllamav2 with that extension, and paged mode switched on
model       a model that reads its context back through the page table, so that a wrong page is a wrong token
"""
