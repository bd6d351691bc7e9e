"""InitProducerId: numbers for idempotent producers. Transactions are refused."""

from __future__ import annotations

from walstream.errors import NotAuthorized, TransactionsUnsupported
from walstream.node.context import Context
from walstream.node.wire import Message, Reply


async def init_producer_id(context: Context, request: Message) -> Reply:
    """Return a producer id that no producer ever had; a producer that asks again gets another."""
    if request.transactional_id is not None:
        raise TransactionsUnsupported(
            "Transactions are not offered.", "Use an idempotent producer without a transactional id."
        )
    principal = context.connection.principal
    if not context.node.security.authorizer.allows_some(principal, "write", "topic"):
        raise NotAuthorized(f"{principal.name} may not write to any topic.")
    # Beside the loop: one in a thousand waits for the disk.
    return {"producer_id": await context.in_thread(context.node.catalogue.next_producer_id), "producer_epoch": 0}
