"""The channel to the daemon and its methods, and requests from plain arguments.

A Wire belongs to the process that made it: grpcio's channels do not survive a fork, and a shared
socket would mix the requests of two processes. It has a subchannel pool of its own for the same
reason. There is one connection a Wire, so what was sent later is read later: whoever asks the
daemon about an operation knows that its request was read before.

Keep-alive pings are off on purpose. On a unix socket the kernel tells at once when the daemon is
gone; a ping that is not answered would only cut off a daemon that was stopped for a while.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np

from kvtier._proto import kvtier_pb2 as pb
from kvtier.errors import DeadlineExceeded, InvalidArgument, from_rpc
from kvtier.types import Cursor, ModelSpec, Moves, Quantisation

MESSAGE_BYTES_MAX = 8 << 20
_INT_MAX = 2**31 - 1
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", _INT_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A daemon that restarts is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt to connect may take, in spite of its name.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_SERVICE = "/kvtier.v1.KvTier/"
_HEALTH = "/grpc.health.v1.Health/Check"
# HealthCheckResponse{status: SERVING}; its request for "" (all of it) has no bytes.
_HEALTH_SERVING = b"\x08\x01"
_UNIX_PATH_BYTES_MAX = 107
_ENGINE_BLOCKS_TAG = b"\x2a"  # field 5 of Moves, a packed one


class Wire:
    """A channel to the daemon on a unix socket; nothing is opened before the first call."""

    def __init__(self, socket: str) -> None:
        self.pid = os.getpid()
        self.channel = grpc.insecure_channel("unix:" + socket, options=_OPTIONS)
        self.open_namespace = self._unary("OpenNamespace", pb.OpenNamespaceAnswer)
        self.lookup = self._unary("Lookup", pb.LookupAnswer)
        self.reserve = self._unary("Reserve", pb.ReserveAnswer)
        self.demote = self._unary("Demote", pb.DemoteAnswer)
        self.quiesce = self._unary("Quiesce", pb.QuiesceAnswer)
        self.release = self._unary("Release", pb.ReleaseAnswer)
        self.stats = self._unary("Stats", pb.StatsAnswer)
        # A promote without progress has one event, its result: it needs no stream and so no thread
        # that reads one.
        self.promote = self._unary("Promote", pb.PromoteEvent)
        self.promote_stream = self.channel.unary_stream(
            _SERVICE + "Promote",
            request_serializer=pb.PromoteRequest.SerializeToString,
            response_deserializer=pb.PromoteEvent.FromString,
        )
        self.attach = self.channel.stream_stream(
            _SERVICE + "Attach",
            request_serializer=pb.AttachRequest.SerializeToString,
            response_deserializer=pb.AttachEvent.FromString,
        )
        self._health = self.channel.unary_unary(
            _HEALTH, request_serializer=_as_it_is, response_deserializer=_as_it_is
        )

    def _unary(self, method: str, answer: Any) -> Any:
        return self.channel.unary_unary(
            _SERVICE + method,
            request_serializer=_serialize,
            response_deserializer=answer.FromString,
        )

    def is_serving(self, timeout_s: float) -> bool:
        return bool(self._health(b"", timeout=timeout_s) == _HEALTH_SERVING)


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()  # type: ignore[no-any-return]


def _as_it_is(message: bytes) -> bytes:
    return message


def call(method: Callable[..., Any], request: Any, timeout_s: float, **options: Any) -> Any:
    """The answer of a unary call within timeout_s, or the KvtierError of what went wrong."""
    try:
        return method(request, timeout=timeout_s, **options)
    except grpc.RpcError as error:
        raise from_rpc(error) from None


def call_for_grant(
    method: Any, request: Any, timeout_s: float, late_s: float, on_late: Callable[[Any], None]
) -> Any:
    """As call(), for an answer that may bring a lease or a ticket, which somebody has to give back.

    A deadline that passes here cannot tell whether the daemon answered just before, and what it
    granted would be held until it expires. So the daemon has late_s longer than the caller: an
    answer after timeout_s goes to on_late, in a thread of gRPC, and the caller gets
    DeadlineExceeded in time.
    """
    future = method.future(request, timeout=timeout_s + late_s)
    try:
        return future.result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        future.add_done_callback(lambda late: _hand_over(late, on_late))
        raise DeadlineExceeded(f"no answer within {timeout_s:g} s") from None
    except grpc.RpcError as error:
        raise from_rpc(error) from None


def _hand_over(late: Any, on_late: Callable[[Any], None]) -> None:
    if late.code() == grpc.StatusCode.OK:
        on_late(late.result())


def checked_socket(path: str) -> str:
    """The absolute path of a socket, or InvalidArgument when no socket can have it."""
    path = os.path.abspath(path)
    if len(os.fsencode(path + ".regions")) > _UNIX_PATH_BYTES_MAX:
        raise InvalidArgument(
            f"socket: {path} and its .regions are longer than the {_UNIX_PATH_BYTES_MAX} bytes "
            "that a unix socket's path may have"
        )
    return path


# ---- requests ------------------------------------------------------------------------------------


def token_bytes(tokens: Any) -> bytes:
    """Token ids as the daemon wants them: little-endian u32. bytes are taken as such already.

    An array of u32 is copied once, other integers are converted first. InvalidArgument when ids do
    not fit.
    """
    if isinstance(tokens, bytes):
        return tokens
    if isinstance(tokens, (bytearray, memoryview)):
        return bytes(tokens)
    try:
        array = np.asarray(tokens)
        if array.dtype.kind not in "iu" and array.size > 0:
            raise InvalidArgument(f"tokens: integers are wanted, not {array.dtype}")
        if array.dtype.itemsize > 4 or array.dtype.kind == "i":
            _check_range(array)
        return array.astype("<u4", copy=False).tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"tokens: {error}") from None


def _check_range(array: np.ndarray[Any, Any]) -> None:
    if array.size > 0 and (int(array.min()) < 0 or int(array.max()) >= 2**32):
        raise InvalidArgument("tokens: ids are 0 .. 2^32 - 1")


def prefix(
    tokens: Any,
    salt: bytes,
    lora: bytes,
    cursor: Cursor | None,
    extra_keys: Sequence[tuple[int, bytes]] = (),
) -> pb.Prefix:
    message = pb.Prefix(
        salt=salt,
        lora=lora,
        cursor=b"" if cursor is None else cursor.handle,
        tokens=token_bytes(tokens),
    )
    for block_idx, key in extra_keys:
        message.extra_keys.add(block_idx=block_idx, key=key)
    return message


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def moves(these: Sequence[Moves]) -> list[pb.Moves]:
    """The messages of moves. Engine blocks go in as the bytes that they are on the wire: a list of
    65,536 Python integers would take milliseconds."""
    messages = []
    for one in these:
        message = pb.Moves(component=one.component)
        count = len(one.engine_blocks)
        if count > 0:
            ids = np.asarray(one.engine_blocks, dtype="<u8").tobytes()
            message.MergeFromString(_ENGINE_BLOCKS_TAG + _varint(len(ids)) + ids)
        blocks = one.blocks
        if isinstance(blocks, range) and blocks.step == 1:
            message.first_block_idx = blocks.start
            message.blocks_count = len(blocks)
        else:
            message.block_idx.extend(int(block) for block in blocks)
        messages.append(message)
    return messages


def open_namespace(spec: ModelSpec) -> pb.OpenNamespaceRequest:
    request = pb.OpenNamespaceRequest(
        block_tokens=spec.block_tokens,
        ranks=spec.ranks,
        model=spec.model,
        revision=spec.revision,
        dtype=spec.dtype,
        layout=spec.layout,
        tags=spec.tags,
    )
    for component in spec.components:
        request.components.add(
            kind=int(component.kind),
            window_tokens=component.window_tokens,
            bytes_per_block=component.bytes_per_block,
            is_replicated=component.is_replicated,
            name=component.name,
            quantisation=_quantisation(component.quantisation),
        )
    return request


def _quantisation(quantisation: Quantisation | None) -> pb.Quantisation | None:
    if quantisation is None:
        return None
    return pb.Quantisation(
        kind=int(quantisation.kind),
        elem=int(quantisation.element),
        order=int(quantisation.order),
        plane_tokens=quantisation.plane_tokens,
        heads=quantisation.heads,
        head_dim=quantisation.head_dim,
    )


class OpIds:
    """Numbers of operations: never the same twice on one node, whatever restarts. An operation of
    an earlier session of the same rank is asked for by its number, so a process that was started
    again must not use its predecessor's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = int.from_bytes(os.urandom(7), "little") | 1

    def take(self) -> int:
        with self._lock:
            self._next += 1
            return self._next
