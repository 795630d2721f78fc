"""Identity of a request's blocks beside their tokens; and the breaker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllm_fakes as fakes
from kvtier.vllm.breaker import Breaker
from kvtier.vllm.keys import LoraNames, RequestKeys, bounded, request_keys, salt_since

SIZE = 64


def keys_of(request: fakes.Request) -> RequestKeys:
    keys = request_keys(request, SIZE, LoraNames())
    assert keys is not None
    return keys


def with_items(*items: fakes.Item, tokens: int = 256) -> list[tuple[int, bytes]]:
    request = fakes.Request("r", [0] * tokens, mm_features=list(items))
    return keys_of(request).extra(0, tokens // SIZE)


def test_salt_and_lora_are_apart(tmp_path: Path) -> None:
    """A salt and an adapter of one name, which other systems took for each other."""
    salted = keys_of(fakes.Request("r", [1], cache_salt="x"))
    adapted = keys_of(fakes.Request("r", [1], lora_request=fakes.LoraRequest("x", str(tmp_path))))
    assert (salted.salt, salted.lora) == (b"x", b"")
    assert adapted.salt == b""
    assert adapted.lora.startswith(b"x@")


def test_long_salts_are_hashed_and_never_meet() -> None:
    long = bounded("a" * 1000)
    assert len(long) <= 256
    assert bounded("a" * 999) != long
    assert bounded(long.decode()) != long
    assert bounded("b" * 200) == b"b" * 200


def test_salts_since_a_reset_are_of_it_alone() -> None:
    longest = bounded("b" * 200)
    assert len(salt_since(b"0123456789abcdef", longest)) <= 256
    since = {salt_since(tag, salt) for tag in (b"1" * 8, b"2" * 8) for salt in (b"", b"x")}
    assert len(since) == 4
    assert salt_since(b"", b"x") == b"x"
    for salt in since:
        assert bounded(salt.decode()) != salt, "a user's salt is none of a reset"


def test_an_adapter_is_its_name_path_and_files(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(b"1")
    names = LoraNames()
    lora = fakes.LoraRequest("n" * 300, str(adapter))
    first = names.key(lora)
    assert len(first) <= 256
    weights.write_bytes(b"22")
    assert names.key(lora) == first  # vLLM goes on with what it loaded
    assert LoraNames().key(lora) != first  # an engine that starts now does not
    lora.load_inplace = True
    assert names.key(lora) != first
    other = tmp_path / "other"
    with pytest.raises(FileNotFoundError):
        names.key(fakes.LoraRequest("n" * 300, str(other)))
    other.mkdir()
    assert names.key(fakes.LoraRequest("n" * 300, str(other))) != first
    assert names.key(None) == b""


def test_a_block_has_a_key_exactly_if_an_item_touches_it() -> None:
    assert with_items(fakes.Item("img", 0, 64))[0][0] == 0
    assert [at for at, _ in with_items(fakes.Item("img", 64, 64))] == [1]
    assert [at for at, _ in with_items(fakes.Item("img", 63, 2))] == [0, 1]
    assert [at for at, _ in with_items(fakes.Item("a", 0, 1), fakes.Item("b", 255, 1))] == [0, 3]
    assert with_items() == []


def test_neither_two_images_nor_two_splits_have_one_key() -> None:
    prompts = [
        with_items(fakes.Item("a", 10, 20)),
        with_items(fakes.Item("b", 10, 20)),
        with_items(fakes.Item("a", 11, 20)),
        with_items(fakes.Item("a", 10, 21)),
        with_items(fakes.Item("a", 10, 10), fakes.Item("a", 20, 10)),
        with_items(fakes.Item("a", 10, 10), fakes.Item("b", 20, 10)),
        with_items(fakes.Item("b", 10, 10), fakes.Item("a", 20, 10)),
    ]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    spread = dict(with_items(fakes.Item("a", 32, 192)))
    assert len({spread[1], spread[2]}) == 2  # other parts of the item


def test_keys_count_from_where_the_call_begins() -> None:
    request = fakes.Request("r", [0] * 256, mm_features=[fakes.Item("a", 100, 100)])
    keys = keys_of(request)
    whole, rest = dict(keys.extra(0, 4)), dict(keys.extra(2, 4))
    assert sorted(whole) == [1, 2, 3]
    assert rest == {0: whole[2], 1: whole[3]}
    assert keys.extra(2, 3) == [(0, whole[2])]


class Embeds:
    """As much of a tensor as is read."""

    def __init__(self, values: Any, dtype: str = "float32") -> None:
        self.values, self.dtype = np.asarray(values), dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> Embeds:
        return Embeds(self.values[part], self.dtype)

    def detach(self) -> Embeds:
        return self

    cpu = contiguous = detach

    def double(self) -> Embeds:
        return Embeds(self.values.astype("f8"))

    def numpy(self) -> Any:
        return self.values


def test_embeddings_are_keyed_by_content() -> None:
    def extra(values: Any, dtype: str = "float32") -> list[tuple[int, bytes]]:
        request = fakes.Request("r", [0] * 128, prompt_embeds=Embeds(values, dtype))
        return keys_of(request).extra(0, 2)

    base = np.zeros((100, 4))
    other = base.copy()
    other[99, 3] = 1e-7
    assert [at for at, _ in extra(base)] == [0, 1]
    assert extra(base) == extra(base.copy())
    assert extra(base)[0] == extra(other)[0]
    assert extra(base)[1] != extra(other)[1]
    assert extra(base, "bfloat16") != extra(base)


def test_which_positions_are_embeddings_counts() -> None:
    """Token 0 at a position is not the embedding that the tensor has there."""

    def extra(is_token: list[bool] | None) -> list[tuple[int, bytes]]:
        request = fakes.Request("r", [0] * 128, prompt_embeds=Embeds(np.ones((128, 4))))
        request.prompt_is_token_ids = is_token
        return keys_of(request).extra(0, 2)

    one, two = [False] * 128, [False] * 100 + [True] + [False] * 27
    assert extra(one)[0] == extra(two)[0]
    assert extra(one)[1] != extra(two)[1]
    assert extra(None)[0] != extra(two)[0]


def test_what_cannot_be_keyed_is_not_cached() -> None:
    loras = LoraNames()
    assert request_keys(fakes.Request("r", [1], pooling_params=object()), SIZE, loras) is None
    item = fakes.Item("a", 0, 1)
    item.identifier = None  # type: ignore[assignment]
    assert request_keys(fakes.Request("r", [1], mm_features=[item]), SIZE, loras) is None


def test_breaker_lets_one_probe_through_at_a_time() -> None:
    breaker = Breaker(failures_max=3, backoff_s=1.0, backoff_max_s=3.0)
    for _ in range(2):
        breaker.failed(0.0)
        assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert breaker.is_open
    assert not breaker.allows(0.99)
    assert breaker.allows(1.0)
    assert not breaker.allows(1.5)
    breaker.failed(1.5)  # the probe: back-off doubles
    assert not breaker.allows(3.4)
    assert breaker.allows(3.5)
    breaker.failed(3.5)
    assert breaker.allows(6.5)  # not more than the most
    breaker.succeeded()
    assert breaker.allows(6.5)
    for _ in range(3):
        breaker.failed(7.0)
    assert not breaker.allows(7.9)
    assert breaker.allows(8.0)  # the first back-off again


def test_what_was_begun_before_it_opened_does_not_keep_it_open_longer() -> None:
    breaker = Breaker(failures_max=3, backoff_s=1.0)
    for _ in range(20):
        breaker.failed(0.0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(failures_max=2)
    for now_s in range(10):
        breaker.failed(float(now_s))
        breaker.succeeded()
        assert breaker.allows(float(now_s))


@pytest.mark.parametrize("text", ["", "x"])
def test_an_empty_salt_is_none(text: str) -> None:
    keys = keys_of(fakes.Request("r", [1], cache_salt=text or None))
    assert keys.salt == text.encode()
