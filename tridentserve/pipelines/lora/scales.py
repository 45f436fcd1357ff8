"""By how much a LoRA changes each layer: what its file says of that, in tensors or in a configuration of PEFT's.

A file comes from anywhere, so nothing of it is believed: what makes no sense raises `ValueError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from diffusers.utils import convert_unet_state_dict_to_peft
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError

from tridentserve.validation import problem_text

# The scale of a layer, by its path and the rank of its change.
Scales = Callable[[str, int], float]

# PEFT takes any regular expression, and there are some that take years to match: only names of modules, or ends of such
# names, are taken, with the anchor that diffusers writes before whole ones.
_Pattern = Annotated[str, StringConstraints(pattern=r"^\^?[A-Za-z0-9_.]+$")]


class _PeftConfig(BaseModel):
    """What PEFT's `LoraConfig` says of scales, which diffusers writes into the files that it saves. The rest of it says
    how the LoRA was trained."""

    model_config = ConfigDict(strict=True, frozen=True)

    r: Annotated[int, Field(ge=1)] | None = None
    lora_alpha: FiniteFloat | None = None
    alpha_pattern: dict[_Pattern, FiniteFloat] | None = None
    use_rslora: bool | None = None


def scales_by_alphas(alphas: Mapping[str, Any], suffix: str) -> Scales:
    """Alpha over rank, 1 where the file names no alpha. `suffix`: of the tensors that some alphas are named after."""
    named = {key.removesuffix(".alpha"): float(alpha) for key, alpha in alphas.items()}
    if odd := sorted(key for key, alpha in named.items() if not math.isfinite(alpha)):
        raise ValueError(f"the alpha of {odd[0]} is {named[odd[0]]}")
    # Of Kohya's attention layers they are named after the tensor, not the layer.
    by_path = {key.removesuffix(suffix): alpha for key, alpha in convert_unet_state_dict_to_peft(named).items()}
    return lambda path, rank: by_path.get(path, rank) / rank


def scales_by_config(config: Mapping[str, Any]) -> Scales:
    """As PEFT's configuration says."""
    try:
        said = _PeftConfig.model_validate(config)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {problem_text(each)}" for each in error.errors()]
        raise ValueError(f"in its metadata, {'; '.join(problems[:3])}") from None
    patterns = {re.compile(rf"(.*\.)?({pattern})$"): alpha for pattern, alpha in (said.alpha_pattern or {}).items()}

    def scale(path: str, rank: int) -> float:
        matching = (alpha for pattern, alpha in patterns.items() if pattern.match(path))
        alpha = next(matching, rank if said.lora_alpha is None else said.lora_alpha)
        return alpha / (math.sqrt(rank) if said.use_rslora else rank)

    return scale
