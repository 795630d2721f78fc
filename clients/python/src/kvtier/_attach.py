"""The thread that keeps a session attached.

    lend regions -> OpenNamespace -> Attach -> attached -> notices ... -> the stream ends -> again

A session whose memory is on a GPU that the daemon lost ends itself when it hears so, and comes back
with regions that are registered anew. The same notice comes when a GPU is lost that the engine
reads blocks of in place; a session without memory on a GPU stays as it is then.

After a failure it waits 0.1 s, then twice as long each time up to 5 s, give or take a quarter so
that the engines of a node do not come at once. It ends when the session is closed and none of its
operations is unfinished: as long as there is one, somebody has to ask the daemon about it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from kvtier import errors
from kvtier._daemon import NobodyListens, Process, RegionSocket
from kvtier._proto import kvtier_pb2 as pb
from kvtier.region import CudaIpcRegion, Region
from kvtier.types import API_VERSION, Namespace

if TYPE_CHECKING:
    from kvtier._session import RankSession

_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0
_BACKOFF_JITTER = 0.25
_STEP_TIMEOUT_S = 5.0  # of each step of attaching
# A daemon that cannot be watched counts as gone when its socket has refused for so long; it is
# longer than a daemon may take to stop (stop.deadline, 30 s unless configured).
_REFUSED_MAX_S = 60.0


class Attacher:
    """Runs until stop() and the last unfinished operation. One for each session."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._client = session.client
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._stream: Any = None
        self._hangup: threading.Event | None = None
        self._generation = 0
        self._refused_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Ends the session in order within timeout_s; what takes longer goes on by itself."""
        until_s = time.monotonic() + timeout_s
        self._is_stopping.set()
        for op in self._session.unfinished():
            op.wait(max(0.0, until_s - time.monotonic()))
        if self._session.unfinished():
            self._hang_up_when_idle()
            return
        self._hang_up()
        if self._thread is threading.current_thread():
            return  # closed by on_change
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            with self._lock:
                stream = self._stream
            if stream is not None:
                stream.cancel()
            self._thread.join(1.0)

    def _hang_up(self) -> None:
        with self._lock:
            if self._hangup is not None:
                self._hangup.set()

    def _hang_up_when_idle(self) -> None:
        if self._session.unfinished():
            self._client.dispatcher.call_later(0.5, self._hang_up_when_idle)
        else:
            self._hang_up()

    # ---- the thread ------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._is_stopping.is_set() and not self._session.unfinished()

    def _run(self) -> None:
        backoff_s = _BACKOFF_S
        while not self._is_over():
            error = self._attach_and_read()
            if self._session.current is not None:
                backoff_s = _BACKOFF_S
            self._session.set_lost(error)
            self._look_after_unwatched(error)
            pause_s = backoff_s * random.uniform(1 - _BACKOFF_JITTER, 1 + _BACKOFF_JITTER)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
            if self._is_stopping.is_set():
                time.sleep(0.0 if self._is_over() else pause_s)
            else:
                self._is_stopping.wait(pause_s)

    def _attach_and_read(self) -> errors.KvtierError:
        """One life of the session; returns why it ended, or why there was none."""
        try:
            with RegionSocket(self._client.socket, _STEP_TIMEOUT_S) as lender:
                process = self._client.process_of(lender)
                request = self._request(lender)
            namespace = self._client.open_namespace(self._session.identity.spec)
            request.namespace_handle = namespace.handle
            return self._read(request, namespace, process)
        except errors.KvtierError as error:
            return error
        except grpc.RpcError as error:
            return errors.from_rpc(error)
        except (TypeError, ValueError) as error:  # a number or a text that no message can have
            return errors.InvalidArgument(f"attach: {error}")

    def _request(self, lender: RegionSocket) -> pb.AttachRequest:
        who = self._session.identity
        request = pb.AttachRequest(
            engine_id=who.engine_id,
            role=pb.Role.Name(who.role),
            rank=who.rank,
            api_version=API_VERSION,
            name=who.name,
        )
        for region in who.regions:
            if isinstance(region, Region):
                request.regions.add(bytes=region.bytes, memfd_token=lender.send(region))
            elif isinstance(region, CudaIpcRegion):
                request.regions.add(bytes=region.bytes, cuda_ipc=_cuda_ipc(region))
            else:
                request.regions.add(bytes=region.bytes, is_inline=True)
        for layout in who.layouts:
            message = request.layouts.add(
                component=layout.component, engine_blocks_per_block=layout.engine_blocks_per_block
            )
            for piece in layout.pieces:
                message.pieces.add(
                    region_idx=piece.region_idx,
                    bytes=piece.bytes,
                    offset_bytes=piece.offset_bytes,
                    stride_bytes=piece.stride_bytes,
                )
        return request

    def _read(
        self, request: pb.AttachRequest, namespace: Namespace, process: Process
    ) -> errors.KvtierError:
        hangup = threading.Event()
        stream: Any = self._client.wire().attach(_once(request, hangup))
        with self._lock:
            self._stream, self._hangup = stream, hangup
        # The stream has no deadline; its first event has one.
        late = threading.Timer(_STEP_TIMEOUT_S, stream.cancel)
        late.daemon = True
        late.start()
        why = "the session is closed"
        is_answered = False
        try:
            for event in stream:
                if event.WhichOneof("event") == "attached":
                    is_answered = True
                    late.cancel()
                    self._on_attached(event.attached, namespace, process)
                    continue
                self._session.on_notice(event.notice)
                if event.notice.kind == pb.Notice.REGIONS_LOST and self._has_gpu_memory():
                    why = "the daemon lost the GPU of the session's memory: attaching again"
                    hangup.set()
            return errors.NotAttached(why)
        except grpc.RpcError as error:
            why_not = errors.from_rpc(error)
            if stream.code() == grpc.StatusCode.CANCELLED and not self._is_stopping.is_set():
                why_not = errors.DeadlineExceeded("the daemon did not answer Attach in time")
            why_not.is_of_attach = not is_answered
            return why_not
        finally:
            late.cancel()
            hangup.set()
            stream.cancel()  # no more than a formality unless reading it failed
            with self._lock:
                self._stream = self._hangup = None

    def _has_gpu_memory(self) -> bool:
        """Else the notice was of blocks that the engine reads in place: the session goes on."""
        return any(isinstance(r, CudaIpcRegion) for r in self._session.identity.regions)

    def _on_attached(self, attached: Any, namespace: Namespace, process: Process) -> None:
        from kvtier._session import Attachment  # they know each other

        if attached.api_version != API_VERSION:
            raise errors.FailedPrecondition(
                f"the daemon speaks API version {attached.api_version}, this client {API_VERSION}",
                advice="update the daemon",
            )
        # Only one daemon at a time serves a path. That the process is still there means that it is
        # the one that answered, and not one that came after it.
        if process.is_dead:
            raise errors.Unavailable("the daemon was replaced while the session was attached")
        self._generation += 1
        self._refused_since_s = None
        self._session.set_attached(
            Attachment(
                self._generation,
                attached.session,
                namespace,
                process,
                api_version=attached.api_version,
                lease_s_max=attached.lease_ns_max / 1e9,
                ticket_s_max=attached.ticket_ns_max / 1e9,
            )
        )
        if self._is_over():
            self._hang_up()

    def _look_after_unwatched(self, error: errors.KvtierError) -> None:
        """Operations of a daemon whose end nobody tells us, see _REFUSED_MAX_S."""
        if not isinstance(error, NobodyListens):
            self._refused_since_s = None  # one that hangs is there, and may go on copying
            return
        now_s = time.monotonic()
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        if now_s - self._refused_since_s < _REFUSED_MAX_S:
            return
        for op in self._session.unfinished():
            if not op.at.process.is_watched:
                op.on_daemon_gone()


def _cuda_ipc(region: CudaIpcRegion) -> pb.CudaIpc:
    return pb.CudaIpc(
        handle=region.handle, offset_bytes=region.offset_bytes, device_uuid=region.device_uuid
    )


def _once(request: pb.AttachRequest, hangup: threading.Event) -> Iterator[pb.AttachRequest]:
    """The requests of an Attach stream: one, then nothing until hangup, which half-closes it."""
    yield request
    hangup.wait()
