"""The audit: whether the destination holds what the source holds, table by table, at one LSN.

comparing.py      the whole, from the moment that is held still to the report; `audit`
sides.py          the two sides of a table, brought to the same columns and the same LSN
destinations.py   where the rows of the other side are: a warehouse or a replica
table_rows.py     rows of PostgreSQL at one moment, read by executors
fingerprint.py    what a row, and a set of rows, is reduced to
differences.py    the keys that differ, and in what
"""
