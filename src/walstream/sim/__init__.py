"""The deterministic simulator: the real replication core and the real log over a made-up world.

Clock, network, disks and metadata service are simulated and can fail in every way the real ones do; a seed decides
everything, so a run can be repeated byte for byte. After every step the checkers look for a broken promise.
"""
