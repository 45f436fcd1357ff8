"""What the scripts' command lines share: errors of one line, and numbers that are checked where they are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from dispatch.policies import find_policy
from tridentserve.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage, and exits with 2. All scripts use it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removesuffix('.py')}: {' '.join(message.split())} (see --help)\n")


def positive(number: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that takes a finite `int` or `float` above 0."""

    def parse(text: str) -> float:
        value = number(text)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(text)
        return value

    parse.__name__ = f"positive {'whole number' if number is int else 'number'}"
    return parse


def not_negative(text: str) -> float:
    """A finite number from 0 up."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def policy_name(text: str) -> str:
    """The name of a dispatch policy, or a dotted path to one."""
    try:
        return find_policy(text).name
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(text: str) -> int:
    """A whole number above 0, in plain digits; also for parts of a list."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number above 0")
    return int(text)
