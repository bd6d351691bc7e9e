"""PostgreSQL's write-ahead log, streamed."""

__version__ = "0.1.0"
