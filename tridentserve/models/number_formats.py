"""The number formats in which the components of a model are served. This module does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tridentserve.errors import ConfigError, ModelFolderError
from tridentserve.stages import Stage

if TYPE_CHECKING:
    from tridentserve.models.family import Family

# The names are torch's. `int8` is the format of the weights of linear layers, of text encoders and denoising models;
# all else is in `COMMON_FORMAT` then.
NumberFormat = Literal["float32", "bfloat16", "float16", "int8"]
NUMBER_FORMATS: tuple[NumberFormat, ...] = get_args(NumberFormat)
# Those that all stages may have.
FLOAT_FORMATS = tuple(name for name in NUMBER_FORMATS if name != "int8")
ELEMENT_BYTES: Mapping[NumberFormat, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
# The format on a GPU of a component for which its family names no other.
COMMON_FORMAT: NumberFormat = "bfloat16"
# The component that C runs, and E too where it encodes input images. It has one format in both.
VAE = "vae"
# The names of the components of E that may be int8 begin with this.
_TEXT_ENCODER = "text_encoder"
# Words in the names of components that are no models.
_WITHOUT_WEIGHTS = ("tokenizer", "processor", "feature_extractor", "scheduler", "guider")


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """The number formats that are asked for, by stage. None is the default (see `find_formats`)."""

    encode: NumberFormat | None = None
    """The format of the encoders of texts and images. `int8` is for those of texts alone, and the others compute in the
    same format then."""
    diffuse: NumberFormat | None = None
    """The format of the denoising model, or of both."""
    decode: NumberFormat | None = None
    """The format of the VAE, also where it encodes input images in E."""

    @classmethod
    def parse(cls, given: Any) -> NumberFormats:
        """Formats as they are written down: the name of one for all stages, a mapping from the letters of stages to
        names, or None. Raises `ConfigError` for anything else."""
        if given is None:
            return cls()
        letters = [stage.letter for stage in Stage]
        names = given if isinstance(given, Mapping) else dict.fromkeys(letters, given)
        if unknown := [letter for letter in names if letter not in letters]:
            raise ConfigError(f"{unknown[0]!r} is no stage; use {_join(letters)}")
        for name in names.values():
            if name not in NUMBER_FORMATS:
                raise ConfigError(
                    f"{name!r} is no number format; use {_join(FLOAT_FORMATS)}, for all stages or each of them, or "
                    "int8 for E and D"
                )
        if names.get(Stage.DECODE.letter) == "int8":
            raise ConfigError(
                "C cannot be int8, which is for E and D: write {E: int8, D: int8}, or one of them, and for the others "
                f"{_join((*FLOAT_FORMATS, 'nothing'))}"
            )
        return cls(*(names.get(letter) for letter in letters))

    def find(self, component: str, stage: Stage) -> NumberFormat | None:
        """The format that is asked for a component of a stage."""
        if component == VAE or stage is Stage.DECODE:
            return self.decode
        if stage is Stage.DIFFUSE:
            return self.diffuse
        if self.encode == "int8" and not component.startswith(_TEXT_ENCODER):
            return find_computing_format(self.encode)
        return self.encode


def _join(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def find_computing_format(number_format: NumberFormat) -> NumberFormat:
    """The format in which a model computes that is served in this one, and in which its weights are that are not int8.

    For int8 it is bfloat16 whatever the family's recipe says: numbers of up to 127 are multiplied before their products
    are scaled, for which the range of float16 is too small."""
    return COMMON_FORMAT if number_format == "int8" else number_format


def has_weights(component: str) -> bool:
    """True for a component that is a model, by its name in `model_index.json`."""
    return not any(word in component for word in _WITHOUT_WEIGHTS)


def find_formats(family: Family, asked: NumberFormats, device: str) -> dict[str, NumberFormat]:
    """The number format of each model of a family on a device, as torch names it: the one that is asked for, else
    float32 on a CPU, else that of the family's published recipe. Raises `ModelFolderError` where E is to be int8 and
    has no text encoders."""
    if family.whole and asked.encode == "int8":
        raise ModelFolderError(
            f"a {family.pipeline_class} is served whole, and its text encoders belong to D: {{E: int8}} has no effect, "
            "while {D: int8} makes both int8"
        )
    on_cpu = device.partition(":")[0] == "cpu"
    return {
        component: asked.find(component, stage)
        or ("float32" if on_cpu else family.number_formats.get(component, COMMON_FORMAT))
        for stage, components in family.components.items()
        for component in components
        if has_weights(component)
    }


def describe_formats(formats: Mapping[str, NumberFormat]) -> str:
    """The formats of a model's components in words: the most common one, and the components that have another."""
    (common, _), *others = Counter(formats.values()).most_common()
    parts = [
        f"{number_format} {' '.join(component for component, own in formats.items() if own == number_format)}"
        for number_format, _ in others
    ]
    return f"{common} ({', '.join(parts)})" if parts else common
