"""Remembers what encoders made of inputs that come again: above all of the empty negative prompt, which most requests
have, and of one prompt with many seeds.

An encoder's inputs are compared whole, with all members of a batch: its result for equal inputs is equal bit by bit.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import transformers
from transformers.utils import ModelOutput

from tridentserve.byte_sizes import MIB
from tridentserve.models.families import FAMILIES
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.stages import Stage

# Most bytes of the results of one model on one worker. Those of SD3's three encoders for one prompt take 10 MiB.
MAX_MEMO_BYTES = 32 * MIB
# So many inputs are known that have come once. Only what comes a second time is kept.
_MAX_SEEN = 4096
# Language models give it along for the tokens that would follow; no pipeline looks at it, and it is not kept.
_KEYS_AND_VALUES = "past_key_values"
_PLAIN = (bool, int, float, str, type(None))


class EncoderMemo:
    """The results of some encoders, the least recently used first. It belongs to the thread that runs them."""

    def __init__(self, max_bytes: int = MAX_MEMO_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all results that are kept."""

    def wrap(self, encoder: torch.nn.Module, name: str) -> None:
        """Have the calls of an encoder go through the memo. `name` differs from those of the other encoders."""
        encoder.forward = self._remember(encoder.forward, name)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._seen.clear()
        self.num_bytes = 0

    def _remember(self, stock: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            key = _make_key(name, args, kwargs)
            if key is None:
                return stock(*args, **kwargs)
            if key in self._kept:
                self._kept.move_to_end(key)
                return _copy(self._kept[key])  # whoever gets it may change it
            result = stock(*args, **kwargs)
            if key in self._seen:
                self._keep(key, result)
            else:
                self._seen[key] = None
                if len(self._seen) > _MAX_SEEN:
                    self._seen.popitem(last=False)
            return result

        return forward

    def _keep(self, key: bytes, result: Any) -> None:
        if not _is_known(result):
            return
        num_bytes = _count_bytes(result)
        if num_bytes > self._max_bytes:
            return
        del self._seen[key]
        self._kept[key] = _copy(result)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= _count_bytes(oldest)


def install_memo(adapter: PipelineAdapter) -> EncoderMemo:
    """Have the text and image encoders of a new adapter remember, once. One without stage E has none."""
    memo, pipe = EncoderMemo(), cast(DiffusersAdapter, adapter).pipe
    family = FAMILIES.get(adapter.family)  # none of a pipeline that is served whole, which has no E of its own
    for name in family.components[Stage.ENCODE] if family is not None else ():
        encoder = getattr(pipe, name, None)
        if isinstance(encoder, transformers.PreTrainedModel):
            memo.wrap(encoder, name)
    return memo


def _make_key(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """The digest of all inputs; None for inputs of kinds that it cannot tell apart."""
    digest = hashlib.blake2b(name.encode(), digest_size=32)
    for key, value in (*enumerate(args), *sorted(kwargs.items())):
        if isinstance(value, torch.Tensor):
            digest.update(f"|{key}={value.dtype}{tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, _PLAIN):
            digest.update(f"|{key}={value!r}".encode())
        else:
            return None
    return digest.digest()


def _list_parts(result: Any) -> Iterator[Any]:
    """The parts of a result: tensors, and values of kinds that are not known."""
    if isinstance(result, ModelOutput):
        result = tuple(value for name, value in result.items() if name != _KEYS_AND_VALUES)
    if isinstance(result, tuple | list):
        for part in result:
            yield from _list_parts(part)
    elif result is not None:
        yield result


def _is_known(result: Any) -> bool:
    return all(isinstance(part, torch.Tensor) for part in _list_parts(result))


def _count_bytes(result: Any) -> int:
    return sum(part.nbytes for part in _list_parts(result))


def _copy(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.clone()
    if isinstance(result, ModelOutput):
        return type(result)(**{name: _copy(value) for name, value in result.items() if name != _KEYS_AND_VALUES})
    if isinstance(result, tuple | list):
        return type(result)(_copy(part) for part in result)
    return result
