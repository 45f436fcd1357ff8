"""The factor by which a LoRA changes each layer, from the alphas in its file or from PEFT's configuration there.

Files come from anywhere and are not trusted: values that make no sense raise `ValueError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from diffusers.utils import convert_unet_state_dict_to_peft
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError

from tridentserve.validation import describe_problem

# Returns the scale of a layer for its path and the rank of its change.
Scales = Callable[[str, int], float]

# PEFT accepts any regular expression, and some of them take years to match. So only names of modules, or ends of such
# names, are accepted, with the anchor that diffusers writes before whole names.
_Pattern = Annotated[str, StringConstraints(pattern=r"^\^?[A-Za-z0-9_.]+$")]


class _PeftConfig(BaseModel):
    """The fields of PEFT's `LoraConfig` that determine scales. diffusers writes them into the files that it saves; the
    other fields describe how the LoRA was trained."""

    model_config = ConfigDict(strict=True, frozen=True)

    r: Annotated[int, Field(ge=1)] | None = None
    lora_alpha: FiniteFloat | None = None
    alpha_pattern: dict[_Pattern, FiniteFloat] | None = None
    use_rslora: bool | None = None


def scale_by_alphas(alphas: Mapping[str, Any], suffix: str) -> Scales:
    """Scale each layer by alpha over rank, or by 1 where the file names no alpha.

    `suffix` ends the names of the tensors after which some alphas are named."""
    named = {key.removesuffix(".alpha"): float(alpha) for key, alpha in alphas.items()}
    if odd := sorted(key for key, alpha in named.items() if not math.isfinite(alpha)):
        raise ValueError(f"the alpha of {odd[0]} is {named[odd[0]]}")
    # In Kohya's files the alphas of attention layers are named after the tensor and not after the layer.
    by_path = {key.removesuffix(suffix): alpha for key, alpha in convert_unet_state_dict_to_peft(named).items()}
    return lambda path, rank: by_path.get(path, rank) / rank


def scale_by_config(config: Mapping[str, Any]) -> Scales:
    """Scale each layer as PEFT does with this configuration."""
    try:
        said = _PeftConfig.model_validate(config)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {describe_problem(each)}" for each in error.errors()]
        raise ValueError(f"in its metadata, {'; '.join(problems[:3])}") from None
    patterns = {re.compile(rf"(.*\.)?({pattern})$"): alpha for pattern, alpha in (said.alpha_pattern or {}).items()}

    def scale(path: str, rank: int) -> float:
        matching = (alpha for pattern, alpha in patterns.items() if pattern.match(path))
        alpha = next(matching, rank if said.lora_alpha is None else said.lora_alpha)
        return alpha / (math.sqrt(rank) if said.use_rslora else rank)

    return scale
