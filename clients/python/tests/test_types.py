"""Plain data: what the classes check and sort by themselves."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
from typing import Any

import grpc
import numpy as np
import pytest

import kvtier
from kvtier import errors


def spec(**changes: Any) -> kvtier.ModelSpec:
    fields: dict[str, Any] = {
        "block_tokens": 64,
        "ranks": 1,
        "components": (kvtier.Component(kvtier.Kind.FULL, 4096),),
        "model": "m",
    }
    return kvtier.ModelSpec(**(fields | changes))


def test_tags_are_sorted_and_single() -> None:
    assert spec(tags=("b=2", "a=1", "b=2")).tags == ("a=1", "b=2")
    assert spec(tags=("b=2", "a=1")) == spec(tags=("a=1", "b=2"))


def test_tags_are_sorted_by_bytes() -> None:
    # By code points U+FF5E comes before U+1F600, by bytes too; by UTF-16 it would not.
    assert spec(tags=("\U0001f600", "\uff5e", "z")).tags == ("z", "\uff5e", "\U0001f600")


def test_handles_travel() -> None:
    lease = kvtier.Lease(b"l" * 24, 1.5, 3)
    assert pickle.loads(pickle.dumps(lease)) == lease


def test_outcome_all_done() -> None:
    def outcome(results: tuple[bytes, ...], **more: Any) -> kvtier.Outcome:
        fields: dict[str, Any] = {"error": None, "seconds": 0.0} | more
        return kvtier.Outcome(results, 0, (0, 0, 0), **fields)

    assert outcome((b"\0\0", b"\0")).all_done
    assert not outcome((b"\0\3",)).all_done
    assert outcome((b"\0\3",), is_demote=True).all_done
    assert not outcome((b"\0\4",), is_demote=True).all_done
    assert not outcome((), error=errors.Unavailable("gone")).all_done


def test_each_error_says_what_to_do() -> None:
    for code in grpc.StatusCode:
        error = errors.from_status(code, "because")
        assert isinstance(error, errors.KvtierError)
        assert error.code == code.name
        assert "because" in str(error)
        assert error.advice in str(error)
    assert issubclass(kvtier.NotAttached, kvtier.Unavailable)
    assert kvtier.StaleHandle is kvtier.FailedPrecondition


def test_region_is_sealed_and_shared() -> None:
    with kvtier.Region.create(8192) as region:
        seals = fcntl.fcntl(region.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & fcntl.F_SEAL_GROW
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(region.fd, 4096)
        region.memory[:4] = b"abcd"
        assert os.pread(region.fd, 4, 0) == b"abcd"
        assert not os.get_inheritable(region.fd)


def test_region_does_not_vanish_under_a_user() -> None:
    region = kvtier.Region.create(4096)
    array = np.frombuffer(region.memory, np.uint8)
    with pytest.raises(BufferError):
        region.close()
    region.memory[0] = 7
    assert array[0] == 7
    del array
    region.close()
    region.close()
    with pytest.raises(ValueError, match="closed"):
        region.memory.tobytes()


def test_region_that_nobody_has_frees_its_memory() -> None:
    """An engine that is made anew in one process must not keep the KV memory of the last one."""
    before = set(_memfds())
    region = kvtier.Region.create(4096)
    array = np.frombuffer(region.memory, np.uint8)
    assert len(set(_memfds()) - before) == 2, "one of the region, one of its mapping"
    del region
    gc.collect()
    assert len(set(_memfds()) - before) == 1
    array[0] = 1  # the memory stays as long as somebody uses it
    del array
    gc.collect()
    assert set(_memfds()) <= before


def _memfds() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:kvtier" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(name)
        except FileNotFoundError:  # that of listdir
            continue
    return found


def test_region_refuses_nothing_sizes() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        kvtier.Region.create(0)


def test_cuda_ipc_region_checks_its_handle() -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        kvtier.CudaIpcRegion(b"short", 0, 1, b"u" * 16)


def planes(**changes: Any) -> kvtier.Quantisation:
    fields: dict[str, Any] = {
        "kind": kvtier.QuantKind.FP8_E4M3,
        "element": kvtier.Element.BF16,
        "order": kvtier.PlaneOrder.TOKENS_FIRST,
        "plane_tokens": 16,
        "heads": 2,
        "head_dim": 32,
    }
    return kvtier.Quantisation(**(fields | changes))


def test_quantised_sizes() -> None:
    assert planes().plane_bytes == 2048
    assert planes().stored_bytes(4096) == 2048 + 16
    component = kvtier.Component(kvtier.Kind.FULL, 4096, quantisation=planes())
    assert component.stored_bytes == 2064
    assert kvtier.Component(kvtier.Kind.FULL, 4096).stored_bytes == 4096
    # Codes and scales are each made up to 16.
    assert planes(plane_tokens=1, heads=1, head_dim=17).stored_bytes(34) == 32 + 16


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": 3}, "3 is not a valid QuantKind"),
        ({"element": 0}, "0 is not a valid Element"),
        ({"order": 5}, "5 is not a valid PlaneOrder"),
        ({"plane_tokens": 0}, "plane_tokens=0 is not in 1 .. 65536"),
        ({"head_dim": 65537}, "head_dim=65537 is not in"),
        ({"heads": 65536, "head_dim": 65536}, "is over 1 GiB"),
    ],
)
def test_quantisation_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        planes(**changes)


def test_quantised_components_that_cannot_be() -> None:
    kinds = kvtier.Kind
    with pytest.raises(ValueError, match="recurrent states are not quantised"):
        kvtier.Component(kinds.STATE, 4096, quantisation=planes())
    with pytest.raises(ValueError, match="4098 bytes are not whole planes of 2048"):
        kvtier.Component(kinds.FULL, 4098, quantisation=planes())
    with pytest.raises(ValueError, match="4 bytes a block would become 32"):
        kvtier.Component(
            kinds.FULL, 4, quantisation=planes(plane_tokens=1, heads=1, head_dim=2)
        )
    component = kvtier.Component(kinds.FULL, 4096, quantisation=planes())
    assert spec(components=(component,)).components == (component,)
    with pytest.raises(ValueError, match="planes of 16 tokens do not divide blocks of 72"):
        spec(components=(component,), block_tokens=72)
