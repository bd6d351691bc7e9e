"""Commits to Delta's log with `deltalake`: made once, durable, and known to be made or not.

Owns what an error of a commit means for the files that it names; refuses to know what is committed. An error does not
say that nothing was committed: `deltalake` writes the commit first, and then, after some, a checkpoint of the log, for
which the disk may have no room. So every commit has a mark of its own, by which it is found again in the log.

    it is there                  it is made, whatever failed after it
    it was refused               another commit came first: its files belong to nobody and are deleted
    anything else                nobody knows: the files are left, to the log or to a vacuum

Invariant: a file that a commit names is never deleted here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Final

from deltalake import CommitProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError

from walstream import logs
from walstream.errors import TableConflict
from walstream.spark.writers.files import DataFile, TableFiles, now_ms
from walstream.spark.writers.targets import Commit

MARK: Final = "walstream.commit"

log = logs.get(__name__)


def commit_files(
    files: TableFiles,
    version: int,
    written: Iterable[DataFile],
    commit: Commit | None,
    make: Callable[[CommitProperties], object],
) -> None:
    """Make a commit, which becomes this version or none, durably. Raises TableConflict when another one came first."""
    mark = uuid.uuid4().hex
    try:
        make(_properties(commit, mark))
    except Exception as error:
        if not _is_there(files, version, mark):
            if not _is_refusal(error):
                raise
            files.discard(written)
            raise TableConflict(f"Another commit to {files.uri} came first ({error}).") from error
        log.warning("commit made, but not what follows it", table=files.uri, version=version, error=str(error))
    files.sync_commit(version)


def _properties(commit: Commit | None, mark: str) -> CommitProperties:
    """Return what goes into a commit. It is tried once: whoever loses the race has read a version that is old."""
    applications = []
    metadata = {MARK: mark}
    if commit is not None:
        metadata["userMetadata"] = commit.note
        if commit.app_id is not None:
            applications = [Transaction(commit.app_id, commit.app_version, now_ms())]
    return CommitProperties(custom_metadata=metadata, max_commit_retries=0, app_transactions=applications)


def _is_there(files: TableFiles, version: int, mark: str) -> bool:
    found = files.read_commit(version)
    return found is not None and mark in found


def _is_refusal(error: Exception) -> bool:
    """Whether an error says that the commit was not made and never will be."""
    # Of two that create a table, one is told so in words alone.
    return isinstance(error, CommitFailedError) or (isinstance(error, DeltaError) and "already exists" in str(error))
