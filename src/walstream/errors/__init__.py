"""The one error tree: every failure walstream names.

    WalstreamError
    ├── UsageError                  the caller asked for something that cannot be
    │   └── ConfigError             … in the configuration
    ├── UnreachableError            nobody answers at that address
    │   ├── ConnectionLost          … any more: the connection ended in the middle
    │   ├── LinkTimeout             a node on the other end of a link is silent
    │   └── PeerFailed              … or has said why it ends the link
    ├── UnhealthyError              it answers, and says that it is not well
    ├── RefusedError                security said no
    │   ├── AuthenticationFailed
    │   │   ├── TokenExpired
    │   │   ├── UnsupportedMechanism
    │   │   └── IllegalSaslState
    │   ├── NotAuthorized
    │   │   ├── GroupNotAuthorized
    │   │   └── ClusterNotAuthorized
    │   └── LinkRefused             two nodes that may not replicate
    ├── ProtocolError               the peer sent what the protocol does not allow: the connection is closed
    │   ├── MalformedRequest
    │   ├── UnsupportedVersion
    │   └── LinkError               … a node on the other end of a link: nothing of it is applied
    │       └── LinkVersionUnknown, BadMagic, BadChecksum, FrameTooLarge, MalformedFrame, UnexpectedFrame,
    │           PartitionUnknown, CreditExceeded
    ├── RequestError                a well-formed request that cannot be granted: answered with its code
    │   └── … one class per Kafka error code that walstream answers with
    ├── SourceError                 PostgreSQL cannot give what the capture needs
    │   ├── SlotBusy, SlotExists    another process reads the slot now, or has just made it
    │   ├── SlotMissing, SlotLost   nothing remembers what we have not read yet
    │   ├── PublicationMissing      PostgreSQL was not told what to publish
    │   ├── SourceNotReady          a setting or a limit of the server forbids it
    │   ├── TableChanged            a table is not any more what it was when its snapshot was taken
    │   ├── QueryFailed             a statement failed for a reason without a class of its own
    │   │   └── LockTimeout         … because another session holds a lock for too long
    │   └── DecodeError             bytes that no message of PostgreSQL's looks like
    ├── CaptureError                the log and the source do not fit together, or the log cannot take the rows
    │   ├── DeliveryFailed          the log refused a record: the generation ends, a restart opens the next one
    │   ├── GenerationOver          another capture has opened a later generation
    │   ├── LogUnfit                a topic's settings do not allow what the rule needs
    │   ├── LogLost                 the log has lost what it had
    │   ├── SourceForgot            PostgreSQL has forgotten what the log lacks
    │   └── HistoryForked           the log holds what this source never had
    ├── DataLoss                    what commit points promise is not in the log
    │   ├── RowsMissing             a partition holds another number of rows than its point says
    │   └── CorruptCommits          the commit points contradict each other
    ├── FeedError                   the feed cannot give a subscriber what it asks for
    │   ├── LsnNotAvailable         what it has not read yet was removed from the log
    │   ├── SubscriberTooSlow       it takes nothing
    │   ├── SubscriberLapsed        it holds back more of the log than it may
    │   ├── TooManySubscriptions    as many as there may be are there
    │   ├── AckRefused              it acknowledges what it was not sent
    │   ├── EntryTooLarge           an entry that its channel does not take
    │   ├── EntryDamaged            what arrives at it is not what was sent
    │   └── OperationUnknown        … is more than its version of the client can read
    ├── ValueUnrepresentable        a value that the type of its column in Spark cannot hold
    ├── PipelineError               the log is well, and the tables cannot follow it
    │   ├── SchemaIncompatible      a column became something that the table's values cannot become
    │   ├── KeyMissing              a table without a key in a mode that needs one
    │   ├── TableUnfit              what is, or would be, in a table's folder cannot be what the pipeline needs
    │   ├── TableConflict           somebody else writes to the table at the same time
    │   ├── ForeignLog              the tables were made from another log
    │   ├── SparkFailed             Spark itself: a lost executor, a full disk, a killed worker
    │   ├── WarehouseFailed         the files of the tables, or Delta's log of them, cannot be read or written
    │   └── CutExpired              the moment that was asked for is not kept any more
    └── StorageError                the disk, or what is on it
        ├── DirectoryLocked, DirectoryUnusable
        ├── PartitionOffline        writes refused until the cause is mended, reads go on
        │   ├── DiskFull
        │   ├── OutOfFiles
        │   └── SyncFailed
        └── CorruptLog              bytes that fail their checksum: quarantined, never served

An error is a sentence with the fact in it, a hint that says what to do, and whether trying again can help.
Assertions are for our bugs; these classes are for the world. All of them pickle, because they cross process
boundaries. How each protocol says them is in `error_codes`.
"""

from __future__ import annotations

from walstream.errors.base import *  # noqa: F403
from walstream.errors.links import *  # noqa: F403
from walstream.errors.requests import *  # noqa: F403
from walstream.errors.stages import *  # noqa: F403

for _error in list(vars().values()):
    if isinstance(_error, type):
        # One name wherever an error is printed, pickled or looked for.
        _error.__module__ = __name__
