"""Consumer groups: who is in each group, which generation it is in, and who reads what.

`events.py` what goes in and comes out · `member.py` one member · `roster.py` the members of a group · `protocols.py`
the choice of the assignment strategy · `subscription.py` what a consumer says it reads · `group.py` the state machine
of one group · `coordinator.py` all groups and their deadlines. All of these are pure: time and randomness are
arguments, answers are effects. `service.py` is the shell with the futures, the timer, the clock and the offsets.
"""
