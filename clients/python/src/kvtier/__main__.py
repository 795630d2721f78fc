"""`python -m kvtier`: a look at the daemon from an engine's place."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvtier import __version__, doctor, errors
from kvtier.client import DEFAULT_SOCKET, Client


def _stats(socket: str) -> int:
    """Prints what the cache holds in a few lines; kvtier-ctl stats has all of it."""
    with Client(socket, timeout_s=5.0) as client:
        stats = client.stats()
    print(
        f"kvtierd {stats.version}: {stats.blocks} blocks, {stats.sessions} sessions, "
        f"{stats.leases} leases, {stats.tickets} tickets, {stats.ops_running} requests"
    )
    for tier in stats.tiers:
        if tier.capacity_bytes:
            print(
                f"L{tier.tier}: {tier.used_bytes} of {tier.capacity_bytes} bytes, "
                f"{tier.copies} copies, {tier.hit_tokens} hit tokens"
            )
    if stats.l1.why:
        print(f"L1 is off: {stats.l1.why}")
    states = ("ok", "lost", "not used")
    for gpu in stats.gpus:
        state = states[gpu.state] if gpu.state < len(states) else "unknown"
        print(
            f"{doctor.gpu_name(gpu)}: {state}{': ' if gpu.why else ''}{gpu.why}, "
            f"{gpu.used_bytes} of {gpu.arena_bytes} bytes"
        )
    for space in stats.namespaces:
        rate = space.hit_tokens / space.lookup_tokens if space.lookup_tokens else 0.0
        print(
            f"{space.fingerprint.hex()[:12]} {space.model}: {space.blocks} blocks, "
            f"{space.hit_tokens} of {space.lookup_tokens} tokens hit ({rate:.0%})"
        )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all is well, 1 something is wrong, 2 wrong usage, 3 no daemon."""
    parser = argparse.ArgumentParser(prog="python -m kvtier", description=__doc__)
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("doctor", "is the daemon there, and does it work?"),
        ("stats", "what the cache holds, in a few lines"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--socket",
            default=os.environ.get("KVTIERD_SOCKET", DEFAULT_SOCKET),
            help="the daemon's socket (else KVTIERD_SOCKET, else %(default)s)",
        )
        if name == "doctor":
            command.add_argument(
                "--admin-socket",
                help="where the test's blocks are evicted afterwards (else admin.sock beside the "
                "main one)",
            )
    options = parser.parse_args(arguments)
    try:
        if options.command == "stats":
            return _stats(options.socket)
        admin = options.admin_socket or str(Path(options.socket).with_name("admin.sock"))
        return doctor.report(options.socket, admin)
    except errors.KvtierError as error:
        print(f"python -m kvtier {options.command}: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
