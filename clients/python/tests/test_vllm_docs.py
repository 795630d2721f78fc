"""docs/vllm.md names everything that a user can set or see."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvtier.vllm import metrics
from kvtier.vllm.options import Options

DOCS = Path(__file__).parents[3] / "docs" / "vllm.md"
FAMILIES = [*metrics._COUNTERS, *metrics._GAUGES, *metrics._HISTOGRAMS]


@pytest.fixture(scope="module")
def text() -> str:
    return DOCS.read_text()


@pytest.mark.parametrize("name", [field.name for field in fields(Options)])
def test_each_option_has_its_row(text: str, name: str) -> None:
    assert f"\n| `{name}` |" in text


@pytest.mark.parametrize("name", FAMILIES)
def test_each_metric_is_explained(text: str, name: str) -> None:
    assert f"`vllm:kvtierd_{name}" in text


@pytest.mark.parametrize("word", [*metrics.LOOKUP_OUTCOMES, *metrics.SKIP_REASONS])
def test_each_outcome_and_reason_is_explained(text: str, word: str) -> None:
    assert f"`{word}`" in text
