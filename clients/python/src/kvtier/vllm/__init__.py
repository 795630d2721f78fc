"""The connector for vLLM: ``"kv_connector": "KvtierConnector"`` in ``kvtier.vllm``.

See docs/vllm.md for how to use it. The connector itself is imported on first use, so that
the rest of this package works where vLLM is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvtierConnector":
        from kvtier.vllm.connector import KvtierConnector

        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
