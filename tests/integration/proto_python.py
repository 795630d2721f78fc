"""A client in another language against a real kvtierd: grpcio and what protoc makes of the .proto.

    proto_python.py KVTIERD SOURCE_ROOT

Opens a namespace, attaches with an inline region, stores two blocks, finds them, reads them back.
Skips (77) where grpcio, protobuf or protoc are not installed."""
import os
import subprocess
import sys
import tempfile
import time

SKIP = 77
BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
DEADLINE_S = 30


def skip(why):
    print(f"SKIP: {why}")
    sys.exit(SKIP)


def load_messages(root, directory):
    """The module of kvtier.proto, generated into @directory."""
    try:
        subprocess.run(["protoc", f"--proto_path={root}/proto", f"--python_out={directory}",
                        "kvtier/v1/kvtier.proto"], check=True)
    except FileNotFoundError:
        skip("protoc is not installed")
    sys.path.insert(0, directory)
    from kvtier.v1 import kvtier_pb2  # made a moment ago
    return kvtier_pb2


class Client:
    """The methods of kvtier.v1.KvTier by name, without generated stubs."""

    def __init__(self, channel, pb):
        self.channel = channel
        self.pb = pb

    def message(self, name):
        return getattr(self.pb, name)

    def call(self, method, **fields):
        stub = self.channel.unary_unary(
            f"/kvtier.v1.KvTier/{method}",
            request_serializer=self.message(method + "Request").SerializeToString,
            response_deserializer=self.message(method + "Answer").FromString)
        return stub(self.message(method + "Request")(**fields), timeout=DEADLINE_S)

    def promote(self, **fields):
        """The result of a Promote; events before it are progress."""
        stub = self.channel.unary_stream(
            "/kvtier.v1.KvTier/Promote",
            request_serializer=self.pb.PromoteRequest.SerializeToString,
            response_deserializer=self.pb.PromoteEvent.FromString)
        events = list(stub(self.pb.PromoteRequest(**fields), timeout=DEADLINE_S))
        assert [event.WhichOneof("event") for event in events][-1:] == ["result"], events
        return events[-1].result

    def attach(self, request, until_closed):
        """The events of a session that lasts until @until_closed is set."""
        stub = self.channel.stream_stream(
            "/kvtier.v1.KvTier/Attach",
            request_serializer=self.pb.AttachRequest.SerializeToString,
            response_deserializer=self.pb.AttachEvent.FromString)

        def requests():
            yield request
            until_closed.wait(DEADLINE_S)

        return stub(requests(), timeout=2 * DEADLINE_S)


def wait_serving(grpc, channel, process):
    try:
        grpc.channel_ready_future(channel).result(DEADLINE_S)
    except grpc.FutureTimeoutError:
        raise AssertionError(f"not serving; exit status {process.poll()}") from None


def store_and_read(client, session):
    tokens = b"".join(i.to_bytes(4, "little") for i in range(1000, 1000 + 2 * BLOCK_TOKENS))
    prefix = client.pb.Prefix(salt=b"python", tokens=tokens)
    payload = os.urandom(2 * BLOCK_BYTES)
    miss = client.call("Lookup", session=session, prefix=prefix)
    assert miss.boundary_tokens == 0, miss
    reserved = client.call("Reserve", session=session, prefix=prefix,
                           wants=[{"component": 0, "first_block_idx": 0, "end_block_idx": 2}])
    assert list(reserved.states) == [bytes([client.pb.RESERVE_MISSING] * 2)], reserved
    moves = [{"component": 0, "first_block_idx": 0, "blocks_count": 2}]
    stored = client.call("Demote", session=session, ticket=reserved.ticket, moves=moves,
                         inline_data=payload)
    assert list(stored.results) == [bytes([client.pb.MOVE_DONE] * 2)], stored
    assert stored.moved_bytes == len(payload) and stored.is_quiesced, stored
    client.call("Release", session=session, ticket=reserved.ticket)
    found = client.call("Lookup", session=session, prefix=prefix, wants_lease=True)
    assert found.boundary_tokens == 2 * BLOCK_TOKENS and found.lease, found
    read = client.promote(session=session, lease=found.lease, moves=moves, wants_inline=True)
    assert list(read.results) == [bytes([client.pb.MOVE_DONE] * 2)], read.results
    assert read.inline_data == payload, "other bytes came back than were stored"
    client.call("Release", session=session, lease=found.lease)


def check_refusal(grpc, client, session):
    """An error has its code and a message that names the field."""
    try:
        client.call("Lookup", session=session, prefix={"tokens": b"12345"})
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
        assert "tokens" in error.details(), error.details()
        return
    raise AssertionError("five bytes of tokens were accepted")


def talk(grpc, client):
    import threading

    space = client.call("OpenNamespace", block_tokens=BLOCK_TOKENS, ranks=1, model="python",
                        revision="1", dtype="bf16", layout="plain",
                        components=[{"kind": 1, "bytes_per_block": BLOCK_BYTES, "name": "full"}])
    assert len(space.fingerprint) == 32 and not space.was_known, space
    until_closed = threading.Event()
    request = client.pb.AttachRequest(
        namespace_handle=space.namespace_handle, engine_id=os.urandom(16), name="proto_python",
        role=client.pb.ROLE_SCHEDULER, rank=0, api_version=1,
        regions=[{"bytes": 1 << 20, "is_inline": True}],
        layouts=[{"component": 0, "engine_blocks_per_block": 1,
                  "pieces": [{"region_idx": 0, "bytes": BLOCK_BYTES,
                              "stride_bytes": BLOCK_BYTES}]}])
    events = client.attach(request, until_closed)
    session = next(events).attached.session
    assert len(session) == 24, session
    store_and_read(client, session)
    check_refusal(grpc, client, session)
    until_closed.set()
    rest = [event for event in events if event.notice.kind != client.pb.Notice.QUIESCED]
    assert rest == [], rest
    assert events.code() == grpc.StatusCode.OK, events.details()


def main(kvtierd, root):
    try:
        import google.protobuf  # noqa: F401 (what protoc makes needs it)
        import grpc
    except ImportError as error:
        skip(f"{sys.executable}: {error}")
    with tempfile.TemporaryDirectory(prefix="kvt-") as directory:
        pb = load_messages(root, directory)
        path = os.path.join(directory, "d.sock")
        with open(os.path.join(directory, "log"), "w+", encoding="utf-8") as log:
            process = subprocess.Popen(
                [kvtierd, "--set", f"server.socket={path}", "--set",
                 f"server.admin_socket={directory}/admin.sock", "--set", "index.memory=16MiB",
                 "--set", "tiers.l2.bytes=64MiB", "--set", "tiers.l2.lock=try"],
                stdout=log, stderr=log)
            try:
                start = time.monotonic()
                while not os.path.exists(path) and time.monotonic() - start < DEADLINE_S:
                    time.sleep(0.02)
                with grpc.insecure_channel(f"unix:{path}") as channel:
                    wait_serving(grpc, channel, process)
                    talk(grpc, Client(channel, pb))
                process.terminate()
                assert process.wait(DEADLINE_S) == 0, "the daemon did not stop cleanly"
            except BaseException:
                log.seek(0)
                print(log.read())
                raise
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    print("stored and read back")


if __name__ == "__main__":
    main(*sys.argv[1:3])
