"""Which POSIX shared memory there is. Its names are the machine's: to know whose a segment is, the
program has a /dev/shm of its own, where it may mount one."""

from __future__ import annotations

import ctypes
import os

DIRECTORY = "/dev/shm"
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
OWN_NAMES = (
    "kvt"  # where all of the machine's are seen: what the connector and the daemon might make
)

is_private = False


def make_private() -> None:
    """Gives this process and its later children a /dev/shm of their own; needs CAP_SYS_ADMIN, and
    does nothing without."""
    global is_private
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return
    if libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return
    is_private = libc.mount(b"tmpfs", DIRECTORY.encode(), b"tmpfs", 0, b"mode=1777") == 0


def segments() -> set[str]:
    """Names of segments: all of them, or those that may be ours."""
    names = {entry.name for entry in os.scandir(DIRECTORY) if entry.is_file()}
    return names if is_private else {name for name in names if OWN_NAMES in name}
