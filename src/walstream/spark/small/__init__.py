"""A small batch of one table, done by one task: read, folded, merged into the files that it touches, and written.

To Spark a few hundred rows are three queries, whose planning and compiling takes seconds of processor time; to a task
they are a dict. So a table's part of a micro-batch that is small goes another way, to the same table: the driver plans
the read (reading.py), one executor does the rest (task.py: folding.py, merging.py) and answers with names of files, and
the driver commits those, as it does with files that Spark wrote. No row passes through the driver this way either.

What bounds it: the number of rows and their bytes in the log, both known before anything is read, and the size of the
files that it touches. Beyond these, and for the few things that a task cannot do by itself, it says so before anything
is committed, and Spark does it.
"""
