"""Committed transactions, whole and in commit order, read by the commit points of a capture."""
