"""Decides after which denoising steps of its requests a plan makes previews."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tridentserve.requests import GenerationInputs


class DuePreviews:
    """The previews that the requests of one plan want while it runs. None is made of the last step: the result
    follows."""

    def __init__(self, inputs: Mapping[str, GenerationInputs], now_s: Callable[[], float]) -> None:
        """`inputs` has the plan's requests. `now_s` is a clock, for requests that want a preview from time to time."""
        self._wanting = {request_id: each for request_id, each in inputs.items() if each.wants_previews}
        self._now_s = now_s
        self._latest_s: dict[str, float] = {}

    def claim(self, request_id: str, step: int, num_steps: int) -> bool:
        """True if a preview of this step is due. It counts as made then."""
        inputs = self._wanting.get(request_id)
        if inputs is None or step >= num_steps:
            return False
        if step in list_partial_steps(inputs.partial_images, num_steps):
            return True
        if inputs.preview_interval_s is None:
            return False
        now_s = self._now_s()
        if request_id in self._latest_s and now_s - self._latest_s[request_id] < inputs.preview_interval_s:
            return False
        self._latest_s[request_id] = now_s
        return True


def list_partial_steps(number: int, num_steps: int) -> set[int]:
    """The steps after which so many previews are due, in equal distances; fewer where there are not enough steps."""
    return {num_steps * index // (number + 1) for index in range(1, number + 1)} - {0}
