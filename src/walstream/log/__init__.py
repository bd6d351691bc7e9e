"""The log: partitions of record batches on disk, durable before they are acknowledged."""
