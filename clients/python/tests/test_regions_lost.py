"""A session whose memory is on a GPU that the daemon lost: it attaches again by itself, with its
regions registered anew. The daemon is played: a real one has no GPU to lose here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import kvtier
from kvtier import _attach
from kvtier._proto import kvtier_pb2 as pb
from kvtier._session import Identity, RankSession
from kvtier.types import API_VERSION

_TIMEOUT_S = 20.0


class Stream:
    """One Attach stream: attached, the notices, and then nothing until the client hangs up."""

    def __init__(self, requests: Iterator[pb.AttachRequest], notices: list[pb.Notice]) -> None:
        self.request = next(requests)
        self._requests = requests
        self._notices = notices
        self._is_over = threading.Event()

    def __iter__(self) -> Iterator[pb.AttachEvent]:
        handle = bytes([len(self._notices) + 1]) * 24
        yield pb.AttachEvent(attached=pb.Attached(session=handle, api_version=API_VERSION))
        for notice in self._notices:
            yield pb.AttachEvent(notice=notice)
        for _ in self._requests:
            raise AssertionError("an Attach stream has one request")

    def cancel(self) -> None:
        self._is_over.set()

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


class Lender:
    """A region socket that is not there."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Lender:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Daemon:
    """What an Attacher sees of its client: the first session loses its GPU, the others do not."""

    socket = "/nowhere"
    dispatcher = SimpleNamespace(call_later=lambda *_: None)

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def wire(self) -> Any:
        return SimpleNamespace(attach=self._attach)

    def _attach(self, requests: Iterator[pb.AttachRequest]) -> Stream:
        lost = [
            pb.Notice(kind=pb.Notice.EPOCH, epoch=5),
            pb.Notice(kind=pb.Notice.REGIONS_LOST),
            pb.Notice(kind=pb.Notice.EPOCH, epoch=6),
        ]
        self.streams.append(Stream(requests, [] if self.streams else lost))
        return self.streams[-1]

    def process_of(self, _: object) -> Any:
        return SimpleNamespace(is_dead=False, is_watched=True, pid=1)

    def open_namespace(self, _: object) -> kvtier.Namespace:
        return kvtier.Namespace(b"n" * 24, b"f" * 32, 1, True)

    def drop(self, _: object) -> None:
        pass


def test_attaches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attach, "RegionSocket", Lender)
    region = kvtier.CudaIpcRegion(b"h" * 64, 0, 4096, b"u" * 16)
    spec = kvtier.ModelSpec(
        block_tokens=64,
        ranks=1,
        components=(kvtier.Component(kvtier.Kind.FULL, 4096),),
        model="m",
    )
    layout = kvtier.Layout(0, 1, (kvtier.Piece(0, 4096, 0, 4096),))
    who = Identity(spec, b"e" * 16, kvtier.Role.WORKER, 0, (region,), (layout,), "test")
    changes: list[bool] = []
    again = threading.Event()

    def on_change(is_attached: bool) -> None:
        changes.append(is_attached)
        if changes == [True, False, True]:
            again.set()

    daemon = Daemon()
    session = RankSession(daemon, who, on_change)  # type: ignore[arg-type]
    session.start()
    try:
        assert again.wait(_TIMEOUT_S), changes
        assert session.attached
        assert session.generation == 2
        assert [s.request.regions[0].cuda_ipc.handle for s in daemon.streams] == [b"h" * 64] * 2
    finally:
        session.close()
    assert session.is_over()
