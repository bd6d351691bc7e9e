"""PostgreSQL as a source: its replication protocol, its types and relations, and the sessions that talk to it.

`protocol`, `pgoutput`, `relations` and `types` are pure: bytes and facts in, values out. `session` and what is built
on it do all the talking; `embedded` runs a PostgreSQL of one's own for demonstrations and tests.
"""
