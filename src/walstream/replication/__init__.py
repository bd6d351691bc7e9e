"""Replication of partitions: machines that take events and return effects, and the formats they speak. Sans-IO."""
