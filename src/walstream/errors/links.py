"""What goes wrong on a link between two nodes. Each says itself on the wire by its number, and the link is closed."""

from __future__ import annotations

from walstream.errors.base import ProtocolError, RefusedError, UnreachableError


class LinkError(ProtocolError):
    """The peer sent what the replication protocol does not allow: nothing of it is applied."""


class LinkVersionUnknown(LinkError):
    """The peer speaks a version of the protocol that this node does not."""


class BadMagic(LinkError):
    """A frame does not begin as a frame does: this is no peer, or the stream has lost its step."""


class BadChecksum(LinkError):
    """A frame's bytes are not those that were sent."""


class FrameTooLarge(LinkError):
    """A frame announces more bytes than the node takes."""


class MalformedFrame(LinkError):
    """The fields of a frame do not fit into it, or contradict each other."""


class UnexpectedFrame(LinkError):
    """A frame that is not the peer's to send, or not yet."""


class PartitionUnknown(LinkError):
    """A frame for a partition that was never opened on this link."""


class CreditExceeded(LinkError):
    """The leader sent more than the follower had granted."""


class LinkRefused(RefusedError):
    """The peers may not replicate: another cluster, another node, or a protocol that the settings forbid."""


class LinkTimeout(UnreachableError):
    """The peer was silent for too long."""


class PeerFailed(UnreachableError):
    """The peer has ended the link and said why; `code` is the number of its reason."""

    def __init__(self, message: str, hint: str = "", code: int = 0) -> None:
        super().__init__(message, hint)
        self.code = code
