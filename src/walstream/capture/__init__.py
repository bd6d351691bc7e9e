"""Capture: from PostgreSQL's logical decoding to durable records and commit points in the log."""
