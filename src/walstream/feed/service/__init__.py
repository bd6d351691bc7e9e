"""The WalStream service: streams with bounded queues, acknowledgements, what is kept for whom, the process."""
