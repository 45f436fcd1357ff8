"""The common part of the scripts' command lines: errors of one line, and numbers checked when they are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from tridentserve.errors import ConfigError

# The profile table that plans, simulations and benchmarks use when no other is named.
PROFILES = "l20"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage, and exits with 2. All scripts use it."""

    _modes: Mapping[str, Mapping[str, object]] = {}

    def add_mode(self, name: str, help_text: str, values: Mapping[str, object]) -> None:
        """Add a flag with which options that are not given have these values. Of two flags, the one that was added last
        counts. Call it after the options were added."""
        self._modes = {**self._modes, name: values}
        names = ", ".join(f"{option.replace('_', '-')} {value}" for option, value in values.items())
        self.add_argument(f"--{name}", action="store_true", help=f"{help_text} ({names})")

    def add_quick(self, **values: object) -> None:
        """Add `--quick`, which is such a flag. Call it last."""
        about = "run everything once on the smallest scale, to see that it works; figures mean nothing"
        self.add_mode("quick", about, values)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Read a command line, that of the process unless `args` are given."""
        arguments = super().parse_args(args)
        given = [values for name, values in self._modes.items() if getattr(arguments, name)]
        for values in given:
            self.set_defaults(**values)
        return super().parse_args(args) if given else arguments

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removesuffix('.py')}: {' '.join(message.split())} (see --help)\n")


def make_positive(number: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that takes a finite `int` or `float` above 0."""

    def parse(text: str) -> float:
        value = number(text)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(text)
        return value

    parse.__name__ = f"positive {'whole number' if number is int else 'number'}"
    return parse


def parse_not_negative(text: str) -> float:
    """A finite number from 0 up."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def parse_share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


# argparse names the type of an option in its errors.
parse_not_negative.__name__ = "not negative number"
parse_share.__name__ = "share from 0 to 1"


def parse_sides(text: str) -> list[int]:
    """Three different sides in pixels, comma-separated; ascending."""
    sides = sorted({parse_whole_number(part) for part in text.split(",")})
    if len(sides) != 3 or sides[0] < 16:
        raise argparse.ArgumentTypeError(f"{text!r} must be three sizes, such as 256,384,512")
    return sides


def parse_mix(text: str) -> list[int]:
    """Two or more sides in pixels, comma-separated, in their order; a side may come several times."""
    sides = [parse_whole_number(part) for part in text.split(",")]
    if len(sides) < 2 or min(sides) < 16:
        raise argparse.ArgumentTypeError(f"{text!r} must be two or more sizes of at least 16, such as 64,64,256")
    return sides


def parse_policy_name(text: str) -> str:
    """The name of a dispatch policy, or a dotted path to one."""
    # Imported here: most scripts need no policy, and the solver's libraries take long to import.
    from dispatch.policies import find_policy

    try:
        return find_policy(text).name
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_whole_number(text: str) -> int:
    """A whole number above 0, in plain digits; also for parts of a list."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number above 0")
    return int(text)
