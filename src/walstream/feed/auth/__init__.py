"""Who calls, and what they may read: bearer tokens, the keys that verify them, TLS."""
