"""A replica: a second PostgreSQL that follows the source, written by the pipeline instead of a warehouse.

tables.py    the destination: a micro-batch is one transaction; `open_replica`
staging.py   one table's part of a batch: read, folded, staged
stages.py    the executors' side of that: COPY into the stage
values.py    the text of values
merging.py   from the stage into the table
sql.py       the statements
target.py    what a table of the replica is like
state.py     how far the replica has come
"""
