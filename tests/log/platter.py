"""What a disk holds after a power cut, seen at the system calls: only what fsync or fdatasync was called for.

`Platter` stands between the process and the kernel at `os.fsync` and `os.fdatasync`, below the disk adapter, and looks
at the real files when they are called: fsync of a file makes its content durable, but not its name; fsync of a folder
makes the names in it durable, but not what is behind them. `cut` writes a folder as a power cut leaves it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest


class Platter:
    """Records what is durable below a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._held: dict[int, int] = {}
        """Descriptors by inode number: as long as one is open the kernel gives the number to no other file."""
        self.on_call: Callable[[], None] = lambda: None
        """Called before each system call that makes something durable."""
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            if _path(descriptor).is_relative_to(self._root):
                self.on_call()
                self._note(descriptor)
            call(descriptor)

        return sync

    def _note(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._folders[status.st_ino] = self._names(_path(descriptor))
        else:
            by_number = Path(f"/proc/self/fd/{descriptor}")  # It may have been opened for writing alone.
            self._hold(status.st_ino, by_number)
            self._files[status.st_ino] = by_number.read_bytes()

    def _names(self, folder: Path) -> dict[str, int]:
        names = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                names[entry.name] = entry.inode()
                self._hold(entry.inode(), folder / entry.name)
        return names

    def _hold(self, number: int, path: Path) -> None:
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def cut(self, target: Path, *, keeps_names: bool) -> Path:
        """Write what a power cut leaves to another folder.

        `keeps_names`: every name that was made, renamed or removed is on the disk already, as the file system may
        write names at any time; otherwise only those in folders that were synced.
        """
        self._write(self._root, self._root.stat().st_ino, target, keeps_names=keeps_names)
        return target

    def _write(self, source: Path, number: int, target: Path, *, keeps_names: bool) -> None:
        target.mkdir()
        names = self._names(source) if keeps_names else self._folders.get(number, {})
        for name, inode in names.items():
            if stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
                self._write(source / name, inode, target / name, keeps_names=keeps_names)
            else:
                (target / name).write_bytes(self._files.get(inode, b""))

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()
