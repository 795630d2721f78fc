"""The daemon's process, and the socket that takes descriptors from us.

Memory of an operation whose connection broke may still be read and written, as long as the daemon's
process lives. So a session finds out which process that is (the kernel knows who listens on the
region socket) and holds a pidfd, which tells without polling when it ended. Where the kernel gives
no pidfd (Linux before 6.5 and a daemon in another pid namespace), `is_dead` never becomes true by
itself: then only the answer of a later daemon proves that this one is gone.
"""

from __future__ import annotations

import os
import select
import socket
import struct

from kvtier.errors import InvalidArgument, KvtierError, ResourceExhausted, Unavailable
from kvtier.region import Region

_MAGIC = 0x31524B4B
_REQUEST = struct.Struct("<IIQ")
_ANSWER = struct.Struct("<II16s232s")
_CREDENTIALS = struct.Struct("iII")
_SO_PEERPIDFD = 77


class NobodyListens(Unavailable):
    """There is no socket, or nobody behind it: not a daemon that is slow, or hangs."""


class Process:
    """One life of the daemon, as seen through its region socket."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """Takes over pidfd; -1 is none. pid 0: in a namespace that we do not see."""
        self.pid: int | None = pid if pid > 0 else None
        self.pidfd = pidfd
        self._is_dead = False

    @property
    def is_dead(self) -> bool:
        """The process ended. Ends never come back."""
        fd = self.pidfd  # another thread may close it, but only after the end
        if not self._is_dead and fd >= 0:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            self._is_dead = bool(poll.poll(0))
        return self._is_dead

    @property
    def is_watched(self) -> bool:
        """Its end will be seen."""
        return self.pidfd >= 0

    def on_end(self) -> None:
        """Its pidfd says that it ended."""
        self._is_dead = True
        self.close()

    def close(self) -> None:
        """Lets go of the pidfd; what is known about the process stays known."""
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)


class RegionSocket:
    """A connection to the region socket of a daemon: which process that is, and the way of
    descriptors to it. Raises Unavailable when nobody listens."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path + ".regions"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(self.path)
        except OSError as error:
            self._socket.close()
            raise _not_there(path, error) from None

    def __enter__(self) -> RegionSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def process(self) -> Process:
        """The daemon's process."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = int(_CREDENTIALS.unpack(raw)[0])
        try:
            return Process(pid, self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:  # an older kernel
            pass
        try:
            return Process(pid, os.pidfd_open(pid) if pid > 0 else -1)
        except ProcessLookupError:
            raise Unavailable(f"the daemon on {self.path} (pid {pid}) has just ended") from None

    def send(self, region: Region) -> bytes:
        """Lends a region; the token (16 bytes) that Attach wants of it. It works once, within 30
        seconds."""
        request = _REQUEST.pack(_MAGIC, 0, region.bytes)
        try:
            socket.send_fds(self._socket, [request], [region.fd])
            answer = self._socket.recv(_ANSWER.size)
        except OSError as error:
            raise Unavailable(f"{self.path}: {error}") from None
        if len(answer) != _ANSWER.size:
            raise Unavailable(f"{self.path}: the daemon closed the connection")
        magic, status, token, text = _ANSWER.unpack(answer)
        if magic != _MAGIC:
            raise KvtierError(f"{self.path}: this is not kvtierd's region socket")
        if status != 0:
            raise _refused(status, text.split(b"\0", 1)[0].decode(errors="replace"))
        return bytes(token)


def _refused(status: int, text: str) -> KvtierError:
    said = f"region: {text or os.strerror(status)}"
    if status == 11:  # EAGAIN
        return ResourceExhausted(said)
    return InvalidArgument(said)


def _not_there(path: str, error: OSError) -> Unavailable:
    if isinstance(error, FileNotFoundError):
        return NobodyListens(f"no daemon at {path}: there is no socket {path}.regions")
    if isinstance(error, ConnectionRefusedError):
        return NobodyListens(f"no daemon at {path}: the socket is left over, nobody listens")
    return Unavailable(f"no daemon at {path}: {error.strerror or error}")
