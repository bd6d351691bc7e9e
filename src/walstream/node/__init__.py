"""The node: the log, served to any Kafka client."""
