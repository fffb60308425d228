"""What both exllama plugins share, where it can be imported."""

from __future__ import annotations

from plugins.exllama_common.tests.fixtures import missing, summary

MISSING = missing("tokenflow_exllama")
collect_ignore_glob = ["test_*.py"] if MISSING else []
pytest_terminal_summary = summary("plugins/exllama_common/tests", MISSING)
