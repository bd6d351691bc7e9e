"""The command line: one file per noun, thin clients over the Kafka protocol."""
