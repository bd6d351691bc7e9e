"""What a cluster agrees on: topics, leaders, epochs. A single node agrees with itself, in a file."""
