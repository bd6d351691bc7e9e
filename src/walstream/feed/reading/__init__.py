"""The log as one stream of encoded entries in the order of their LSNs, from anywhere to its end and on.

Knows nothing of gRPC, subscribers' rights or acknowledgements. `reading.py` is what the service asks, `entries.py` the
hot path, `merge.py` the order.
"""
