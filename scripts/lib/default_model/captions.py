"""Captions of scenes, in several wordings."""

from __future__ import annotations

import random

from lib.default_model import words
from lib.default_model.scenes import DrawnScene, Thing


def describe(scene: DrawnScene, rng: random.Random) -> str:
    """Put a scene into words. Sizes and the background are left out now and then, as people do."""
    names_size = rng.random() < 0.5
    if scene.kind == "pair":
        text = _describe_pair(scene, rng, names_size)
    elif scene.kind == "count":
        thing = scene.things[0]
        count = len(scene.things)
        number = words.NUMBERS[count] if rng.random() < 0.8 else str(count)
        noun = words.plural(_pick_noun(thing.shape, rng))
        text = " ".join([number, *([thing.size] if names_size else []), thing.color, noun])
    else:
        text = name_thing(scene.things[0], rng, names_size)
        if scene.position is not None:
            text = f"{text} {scene.position}"
    opening = rng.choices(["", "a picture of ", "an image of ", "a drawing of "], [0.85, 0.07, 0.04, 0.04])[0]
    if scene.kind == "pair" and names_size:
        opening = ""  # The caption would have more words than the encoders read.
    stop = "." if not opening and rng.random() < 0.05 else ""
    text = f"{opening}{text}{describe_background(scene.background, rng)}{stop}"
    return text[:1].upper() + text[1:] if rng.random() < 0.1 else text


def _describe_pair(scene: DrawnScene, rng: random.Random, names_size: bool) -> str:
    relation = scene.relation or ""
    first, second = (name_thing(thing, rng, names_size) for thing in scene.things)
    wording = rng.choice(words.RELATION_WORDINGS[relation])
    return f"{first} {wording} {second}"


def name_thing(thing: Thing, rng: random.Random, names_size: bool) -> str:
    parts = [*([thing.size] if names_size else []), thing.color, _pick_noun(thing.shape, rng)]
    article = "an" if parts[0][0] in "aeiou" else "a"
    return " ".join([article, *parts])


def _pick_noun(shape: str, rng: random.Random) -> str:
    own, *others = words.SHAPES[shape]
    return rng.choice(others) if others and rng.random() < 0.12 else own


def describe_background(background: str, rng: random.Random) -> str:
    """The ending about the background; nothing in a third of the captions, half of those on white."""
    if rng.random() < (0.5 if background == "white" else 0.25):
        return ""
    return rng.choice(
        [
            f" on a {background} background",
            f" on {background}",
            f" with a {background} background",
            f", {background} background",
        ]
    )


def describe_plainly(scene: DrawnScene) -> str:
    """The one caption of a scene that the judge asks for: all that it scores, in plain words."""
    if scene.kind == "count":
        thing = scene.things[0]
        text = f"{words.NUMBERS[len(scene.things)]} {thing.color} {words.plural(thing.shape)}"
    else:
        names = [f"{'an' if thing.color[0] in 'aeiou' else 'a'} {thing.color} {thing.shape}" for thing in scene.things]
        text = names[0]
        if scene.relation is not None:
            text = f"{names[0]} {words.RELATION_WORDINGS[scene.relation][0]} {names[1]}"
        if scene.position is not None:
            text = f"{names[0]} {scene.position}"
    return f"{text} on a {scene.background} background"
