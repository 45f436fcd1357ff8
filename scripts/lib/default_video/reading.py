"""Reading: the text encoder is taught what the words of a caption belong to, before the transformer is trained.

Of two things, the transformer has to give each its own color and direction. Trained with it, the encoder did not learn
which word belongs to which thing. So it is taught alone, from captions, until a linear map of what it makes of a word
tells which of the two things that word describes, and the color, the shape and the direction of that thing.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from lib.default_model import words
from lib.default_video.motion import DIRECTION_WORDINGS
from lib.training.processes import agree, get_rank
from lib.training.runs import TrainingRun
from lib.training.seeds import derive_seed

# Of AdamW: the optimizer of the transformer's matrices lets those of a T5 grow.
_RATE, _BETAS, _WEIGHT_DECAY = 1.5e-3, (0.9, 0.98), 0.01
# It ends when so many of the labels of late are right.
_ENOUGH = 0.99
# The weight of the distance from what the encoder made of words before, which a transformer may know.
_NEARNESS = 0.5
# The label of words that describe no thing.
_NONE = -1


class WordLabels:
    """Labels of the words of a caption, by its tokens: what is to be read of each."""

    NUMBERS = (2, len(words.COLORS), len(words.SHAPES), len(DIRECTION_WORDINGS))
    """The numbers of values of the labels: the place of the thing in the caption, its color, shape and direction."""

    def __init__(self, tokenizer: Any) -> None:
        def number(names: list[tuple[str, ...]]) -> dict[int, int]:
            return {tokenizer.convert_tokens_to_ids(f"▁{name}"): n for n, each in enumerate(names) for name in each}

        self._and = tokenizer.convert_tokens_to_ids("▁and")
        self._directions = number(
            [tuple(wording.split()[-1] for wording in each) for each in DIRECTION_WORDINGS.values()]
        )
        self._others = (number([(color,) for color in words.COLORS]), number(list(words.SHAPES.values())))

    def label(self, ids: torch.Tensor) -> torch.Tensor:
        """Label the words of captions (n, tokens): (n, tokens, 4), in the order of `NUMBERS`; all -1 for words that
        describe no thing, such as those of the background."""
        return torch.tensor([self._label_caption(row) for row in ids.tolist()])

    def _label_caption(self, ids: list[int]) -> list[list[int]]:
        labels = [[_NONE] * len(self.NUMBERS) for _ in ids]
        start = 0
        for place in range(2):
            # The words of a thing end with its direction.
            end = next((index for index in range(start, len(ids)) if ids[index] in self._directions), None)
            if end is None:
                break
            color, shape = (next(known[each] for each in ids[start:end] if each in known) for known in self._others)
            labels[start : end + 1] = [[place, color, shape, self._directions[ids[end]]]] * (end + 1 - start)
            if ids[end + 1 : end + 2] != [self._and]:
                break
            start = end + 2
        return labels


class WordReader(torch.nn.Module):
    """Linear maps from what the encoder makes of a word to its labels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = torch.nn.ModuleList(torch.nn.Linear(width, number) for number in WordLabels.NUMBERS)

    def forward(self, embeds: torch.Tensor) -> list[torch.Tensor]:
        """Read words (n, width): (n, values) for each label."""
        return [each(embeds) for each in self.maps]


def teach_reading(
    folder: Path, encoder: Any, tokenizer: Any, captions: torch.Tensor, seed: int, steps: int, batch: int
) -> bool:
    """Teach the text encoder, where it is, what the words of `captions` (n, tokens) belong to: for `steps` at most,
    `batch` captions each in every process. Its state lies in `folder` as `reading*`. Returns False where it was stopped
    before."""
    torch.manual_seed(derive_seed(seed, "reader"))
    labels, before = WordLabels(tokenizer), copy.deepcopy(encoder).requires_grad_(False)
    reader = WordReader(encoder.config.d_model).to(encoder.device)
    parts = {"text_encoder": encoder, "reader": reader}
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, betas=_BETAS, weight_decay=_WEIGHT_DECAY)
    run = TrainingRun(folder, "reading", parts, [optimizer])
    right = 0.0
    for step in run.iterate(steps):
        torch.manual_seed(derive_seed(seed, "reading", step, get_rank()))
        ids = captions[torch.randint(len(captions), (batch,))].long()
        wanted, ids = labels.label(ids).to(encoder.device), ids.to(encoder.device)
        mask = ids != tokenizer.pad_token_id
        embeds = encoder(ids, mask.long()).last_hidden_state
        known = before(ids, mask.long()).last_hidden_state
        described = wanted[..., 0] != _NONE
        read, asked = reader(embeds[described]), wanted[described].T
        errors = torch.stack([functional.cross_entropy(*pair) for pair in zip(read, asked, strict=True)])
        distance = (embeds - known)[mask].square().mean() / known[mask].var()
        run.learn(errors.mean() + _NEARNESS * distance, _RATE)
        hits = [(each.argmax(-1) == right_ones).float().mean() for each, right_ones in zip(read, asked, strict=True)]
        right = 0.95 * right + 0.05 * min(hits).item()
        if step % 10 == 0:
            run.log(error=errors.mean().item(), distance=distance.item(), right=min(hits).item())
        if agree(right >= _ENOUGH):
            return True
    return run.step == steps
