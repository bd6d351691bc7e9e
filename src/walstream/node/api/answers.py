"""What the handlers share: errors as fields of a reply, and permissions as Kafka's bit fields."""

from __future__ import annotations

from collections.abc import Mapping

from walstream import logs
from walstream.error_codes import codes
from walstream.errors import WalstreamError
from walstream.node.acl import CLUSTER, Question, ResourceKind
from walstream.node.context import Context
from walstream.node.wire import Reply

log = logs.get(__name__)

OPERATIONS_UNASKED = -(2**31)
"""What stands for permissions that the client did not ask for."""

# Kafka's numbers of operations, by the question that stands for them here.
_TOPIC_OPERATIONS: Mapping[Question, tuple[int, ...]] = {
    "read": (3,),
    "write": (4,),
    "admin": (5, 6, 7, 11),
    "describe": (8, 10),
}
_CLUSTER_OPERATIONS: Mapping[Question, tuple[int, ...]] = {"admin": (5, 7, 11), "describe": (8, 10), "write": (12,)}


def failure(context: Context, error: Exception) -> Reply:
    """Return the code and the sentence of an error, for one item of a response; a bug of ours is logged."""
    code = codes(error).kafka
    context.node.metrics.count_errors([code])
    if isinstance(error, WalstreamError):
        return {"error_code": code, "error_message": str(error)}
    log.error("request failed", peer=context.connection.peer, exc_info=error)
    return {"error_code": code, "error_message": f"The node failed: {type(error).__name__}."}


def code_of(context: Context, error: Exception) -> Reply:
    """Return only the code of an error, for an item that has no place for a sentence."""
    return {"error_code": failure(context, error)["error_code"]}


def topic_operations(context: Context, name: str) -> int:
    """Return what the principal may do with a topic."""
    return _operations(context, "topic", name, _TOPIC_OPERATIONS)


def cluster_operations(context: Context) -> int:
    """Return what the principal may do with the cluster."""
    return _operations(context, "cluster", CLUSTER, _CLUSTER_OPERATIONS)


def _operations(context: Context, kind: ResourceKind, name: str, numbers: Mapping[Question, tuple[int, ...]]) -> int:
    allowed = (bits for question, bits in numbers.items() if context.may(question, kind, name))
    return sum(1 << bit for bits in allowed for bit in bits)
