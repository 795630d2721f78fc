"""The user's options: `kv_connector_extra_config` of vLLM's --kv-transfer-config, checked.

A wrong key or value ends the engine's start with a ValueError that names it: a cache that is
silently configured otherwise than its owner believes is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CHOICES = {
    "store": ("prompt", "all", "off"),
    "load": ("async", "sync"),
    "memory": ("auto", "shared", "staging"),
    "window_store": ("boundaries", "all"),
}


def parse_bytes(value: object) -> int:
    """Bytes of "64MiB", "1.5GiB", "4096" or 4096. ValueError for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is no size: give bytes or a text such as '64MiB'")
    if isinstance(value, int):
        return value
    text = value.strip()
    unit = next((u for u in _UNITS if u and text.endswith(u)), "")
    try:
        return int(float(text.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is no size: give bytes or a text such as '64MiB'") from None


@dataclass(frozen=True)
class Options:
    """What can be set, with its defaults.

    socket: the daemon's unix socket.
    lookup_timeout_ms: how long the scheduler waits for a Lookup or a Reserve (1 .. 1000).
    load_timeout_s: how long a load may take before the request is computed instead.
    store: "prompt" keeps what prompts computed, "all" also what was generated, "off" nothing.
    load: "async" lets a request wait outside of the batch while its blocks come, "sync" loads
        within the step; models with several cache groups always load "async".
    memory: whether the engine's KV memory is shared with the daemon ("shared"), copied through a
        buffer ("staging"), or shared where that is possible ("auto").
    staging_bytes: size of that buffer, of each rank.
    store_blocks_max: the part of the engine's block pool that stores may keep from being reused
        while they read it (0 .. 1).
    window_store: whether sliding-window layers are stored near the positions where another request
        is likely to go on ("boundaries") or everywhere ("all").
    lease_s: how long what a lookup matched is kept for this engine without use.
    name: what the daemon's statistics call this engine.
    namespace_tags: further texts that set this engine's cache apart from others'.
    quantise: kinds of layers ("full", "sliding_window") that the daemon keeps in one byte an
        element, and how ("fp8_e4m3", "int8"); engines that differ in it share nothing.
    """

    socket: str = "/run/kvtierd/kvtierd.sock"
    lookup_timeout_ms: float = 20.0
    load_timeout_s: float = 30.0
    store: str = "prompt"
    load: str = "async"
    memory: str = "auto"
    staging_bytes: int = 64 << 20
    store_blocks_max: float = 0.25
    window_store: str = "boundaries"
    lease_s: float = 30.0
    name: str = ""
    namespace_tags: tuple[str, ...] = ()
    quantise: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> Options:
        """From the user's dict. ValueError for unknown keys and impossible values."""
        known = sorted(f.name for f in fields(cls))
        unknown = sorted(set(extra_config) - set(known))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown key {unknown[0]!r}; known are "
                + ", ".join(known)
            )
        values: dict[str, Any] = {}
        for key, value in extra_config.items():
            try:
                values[key] = _parse(key, value)
            except ValueError as error:
                raise ValueError(f"kv_connector_extra_config: {key}: {error}") from None
        return cls(**values)

    @property
    def lookup_timeout_s(self) -> float:
        """`lookup_timeout_ms` in seconds."""
        return self.lookup_timeout_ms / 1000.0


def _parse(key: str, value: object) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ValueError(f"{value!r} is none of " + ", ".join(_CHOICES[key]))
        return value
    if key in ("socket", "name"):
        if not isinstance(value, str) or (key == "socket" and not value):
            raise ValueError(f"{value!r} is no text")
        return value
    if key == "staging_bytes":
        staging_bytes = parse_bytes(value)
        if staging_bytes < 1 << 20:
            raise ValueError(f"{value!r} is less than 1MiB")
        return staging_bytes
    if key == "namespace_tags":
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ValueError(f"{value!r} is no list of texts")
        if not all(isinstance(tag, str) and tag for tag in value):
            raise ValueError(f"{value!r} has something that is no text or an empty one")
        return tuple(value)
    if key == "quantise":
        return _parse_quantise(value)
    return _parse_number(key, value)


def _parse_quantise(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is no object such as {{'full': 'fp8_e4m3'}}")
    for kind, how in value.items():
        if kind == "state":
            raise ValueError("'state': recurrent states are not quantised")
        if kind not in ("full", "sliding_window"):
            raise ValueError(f"{kind!r} is none of full, sliding_window")
        if how not in ("fp8_e4m3", "int8"):
            raise ValueError(f"{kind}: {how!r} is none of fp8_e4m3, int8")
    return tuple(sorted(value.items()))


_RANGES = {
    "lookup_timeout_ms": (1.0, 1000.0),
    "load_timeout_s": (0.1, 3600.0),
    "store_blocks_max": (0.0, 1.0),
    "lease_s": (1.0, 3600.0),
}


def _parse_number(key: str, value: object) -> float:
    least, most = _RANGES[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    if not least <= value <= most:
        raise ValueError(f"{value!r} is not in {least:g} .. {most:g}")
    return float(value)
