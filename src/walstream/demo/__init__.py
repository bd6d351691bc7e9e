"""The demonstration: the whole of walstream on this machine, killed in the middle, and compared at the end.

parts.py      PostgreSQL, node, capture and pipeline, each a process of its own, as a user would start them
workload.py   what the bank does meanwhile: transfers, rollbacks, large values, a column more
verdict.py    what the tables say afterwards: no difference, no transaction torn, how fresh
story.py      the order of events, and what the user sees of them
"""
