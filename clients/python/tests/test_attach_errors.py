"""What a session that does not come about says: Attach itself, or the daemon as a whole.

The daemon is played by a gRPC server of this process, which is late or refuses where a test says
so; a real one is stopped as a whole.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

import engine
import kvtier
from daemon import Daemon
from engine import wait_until
from kvtier import _attach
from kvtier import client as client_module
from kvtier._proto import kvtier_pb2 as pb
from kvtier.types import API_VERSION


class Played(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers OpenNamespace, and each Attach by the next of `attaches`: a status, None (nothing,
    until the client gives up) or True (attached); the last one goes on."""

    def __init__(self, *attaches: grpc.StatusCode | bool | None) -> None:
        self._attaches = list(attaches)
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-")
        self.socket = str(Path(self._directory.name) / "d.sock")
        self._regions = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._regions.bind(self.socket + ".regions")
        self._regions.listen(64)
        self._server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[self])
        self._server.add_insecure_port("unix:" + self.socket)
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()
        self._regions.close()
        self._directory.cleanup()

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        if call.method.endswith("/OpenNamespace"):
            return grpc.unary_unary_rpc_method_handler(
                self._open_namespace,
                pb.OpenNamespaceRequest.FromString,
                pb.OpenNamespaceAnswer.SerializeToString,
            )
        return grpc.stream_stream_rpc_method_handler(
            self._attach, pb.AttachRequest.FromString, pb.AttachEvent.SerializeToString
        )

    def _open_namespace(self, _: object, context: grpc.ServicerContext) -> Any:
        return pb.OpenNamespaceAnswer(namespace_handle=b"n" * 24, fingerprint=b"f" * 32, epoch=1)

    def _attach(
        self, requests: Iterator[pb.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachEvent]:
        how = self._attaches.pop(0) if len(self._attaches) > 1 else self._attaches[0]
        if isinstance(how, grpc.StatusCode):
            context.abort(how, "as the test says")
        if how is None:
            given_up = threading.Event()
            if context.add_callback(given_up.set):
                given_up.wait(60.0)
            return
        yield pb.AttachEvent(attached=pb.Attached(session=b"s" * 24, api_version=API_VERSION))
        context.abort(grpc.StatusCode.UNAVAILABLE, "the daemon stops")


def first_errors(path: str, count: int) -> list[kvtier.KvtierError]:
    """Why the first attempts to attach failed, or how they ended."""
    found: list[kvtier.KvtierError] = []
    with kvtier.Client(path) as client:
        session = engine.attach(client, wait_s=None)

        def is_enough() -> bool:
            error = session.last_error
            if error is None or type(error) is kvtier.NotAttached:
                return False
            if not found or error is not found[-1]:
                found.append(error)
            return len(found) >= count

        wait_until(is_enough, 60.0)
    return found


def test_attach_that_is_not_answered_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attach, "_STEP_TIMEOUT_S", 1.0)
    played = Played(
        None, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, True, None
    )
    try:
        found = first_errors(played.socket, 5)
    finally:
        played.close()
    assert [(type(error), error.is_of_attach) for error in found] == [
        (kvtier.DeadlineExceeded, True),
        (kvtier.DeadlineExceeded, True),
        (kvtier.Unavailable, True),
        (kvtier.Unavailable, False),  # of a session that was there
        (kvtier.DeadlineExceeded, True),
    ]
    assert found[0].text == "the daemon did not answer Attach in time"


def test_daemon_that_is_stopped_or_away_is_not_of_attach(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_OPEN_TIMEOUT_S", 0.3)
    daemon.stop()
    try:
        stopped = first_errors(daemon.socket, 2)
    finally:
        daemon.go_on()
    assert [type(error) for error in stopped] == [kvtier.DeadlineExceeded] * 2
    daemon.kill()
    away = first_errors(daemon.socket, 2)
    assert all(isinstance(error, kvtier.Unavailable) for error in away)
    assert not any(error.is_of_attach for error in stopped + away)
