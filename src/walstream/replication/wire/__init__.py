"""Replication on the wire: bytes to messages and back, and one connection's state machine.

    inbox.py        where received bytes lie until they are a whole frame
    fields.py       reading what a peer sent, writing what it will read: integers, strings, bounds
    refusals.py     how each error is said on the wire
    version_1.py    protocol version 1, byte for byte: handshake, WA frames, HB heartbeats
    version_1_push.py, version_1_copies.py   what its leader sends, what its follower keeps
    hello.py        the handshake of version 2: the extension, the challenge, the proofs
    authentication.py   the proofs of the shared secret
    frames.py       the frames of version 2
    data.py         DATA and REPAIR_DATA, never copied; what compresses them
    control.py      … and every other message of `replication.messages`
    credit.py       how many bytes of data may be under way
    link.py, leader_link.py, follower_link.py   one connection, from the first byte to the last; the leader dials
    redial.py       when it is dialled again, and in which version

Nothing here knows a socket, a clock or a log. What a stranger sends raises nothing but the errors of `errors.links`.
"""
