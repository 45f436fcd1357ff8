"""The directory of a training run: states that are written at once or not at all, and a log of figures."""

from __future__ import annotations

import copy
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lib.training.processes import agree, average_gradients, get_rank

DECAY_SHARE = 0.25
"""The part of the steps, the last ones, in which a learning rate usually falls."""
# Steps in which that of a transformer rises.
_WARM_UP = 200


class TrainingRun:
    """Trains one thing step by step; may be stopped at any moment and goes on where its last state was written.

    `parts` are trained together by `optimizers`, on the device where they are. Averages of their parameters (EMA) are
    kept beside them and are what is used afterwards. States are of tensors of the CPU, so that a run goes on with them
    on any device.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        parts: dict[str, torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.pt"
        self._log = folder / f"{name}.jsonl"
        self.optimizers = optimizers
        self.parts = parts
        self.averages = {key: copy.deepcopy(part).eval().requires_grad_(False) for key, part in parts.items()}
        self.step = 0
        self._stopped = False
        if self._path.exists():
            self._load()

    def iterate(self, steps: int, save_every_s: float = 300.0) -> Iterator[int]:
        """Yield the steps that are left, with a progress bar. Ends early at SIGINT or SIGTERM. Saves meanwhile."""
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        saved_at_s = time.monotonic()
        try:
            with tqdm(
                total=steps, initial=self.step, desc=self._path.stem, mininterval=10, disable=get_rank() > 0
            ) as bar:
                while self.step < steps and not agree(self._stopped):
                    yield self.step
                    self.step += 1
                    bar.update()
                    if time.monotonic() - saved_at_s > save_every_s:
                        self.save()
                        saved_at_s = time.monotonic()
            self.save()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def learn(self, loss: torch.Tensor, rate: float) -> float:
        """Take one step down the gradient of a loss at a learning rate. Returns the gradient's norm."""
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [parameter for part in self.parts.values() for parameter in part.parameters()]
        average_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("share", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm.item()

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Take the present parameters into the averages. The first steps count less, as they are soon outdated."""
        decay = min(decay, (1 + self.step) / (10 + self.step))
        for key, part in self.parts.items():
            for averaged, current in zip(self.averages[key].parameters(), part.parameters(), strict=True):
                averaged.lerp_(current, 1 - decay)

    def restart_average(self, name: str) -> None:
        """Let the average of a part begin with its present parameters, which others than this run have changed."""
        self.averages[name].load_state_dict(self.parts[name].state_dict())

    def log(self, **figures: float) -> None:
        """Append figures of the present step to the run's log (JSON lines)."""
        if get_rank() > 0:
            return
        with self._log.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": self.step, **{key: round(value, 5) for key, value in figures.items()}}) + "\n"
            )

    def save(self) -> None:
        """Write the state beside the last one, then put it in its place."""
        if get_rank() > 0:
            return
        state: dict[str, Any] = {"step": self.step}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        state["parts"] = {key: part.state_dict() for key, part in self.parts.items()}
        state["averages"] = {key: part.state_dict() for key, part in self.averages.items()}
        written = self._path.with_suffix(".tmp")
        torch.save(copy_to_cpu(state), written)
        written.replace(self._path)

    def _load(self) -> None:
        state = torch.load(self._path, map_location="cpu", weights_only=True)
        self.step = state["step"]
        # A run that begins from another's weights has no state of optimizers yet.
        for optimizer, saved in zip(self.optimizers, state.get("optimizers", ()), strict="optimizers" in state):
            optimizer.load_state_dict(saved)
        for key, part in self.parts.items():
            part.load_state_dict(state["parts"][key])
            self.averages[key].load_state_dict(state["averages"][key])

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = True


def copy_to_cpu(value: Any) -> Any:
    """The same value, of dictionaries and lists, with its tensors on the CPU. Those that are there are not copied."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: copy_to_cpu(each) for key, each in value.items()}
    return [copy_to_cpu(each) for each in value] if isinstance(value, list) else value


def load_averages(folder: Path, name: str, parts: dict[str, torch.nn.Module]) -> int:
    """Load the averages of a run into parts, ready to be used. Returns after how many steps they were saved."""
    state = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True)
    for key, part in parts.items():
        part.load_state_dict(state["averages"][key])
        part.eval().requires_grad_(False)
    return int(state["step"])


@dataclass(frozen=True)
class TrainingSetup:
    """The settings with which a transformer is trained."""

    device: torch.device
    """All parts and batches are there."""
    seed: int
    steps: int
    """In all, with those of earlier calls."""
    batch_tokens: int
    """Tokens of a step, with captions. The number of samples follows from their size."""
    grid_every: int
    """Steps from one grid of samples to the next."""
    small_share: float
    """The part of the steps, the first ones, that sees small samples only."""
    peak_rate: float
    """The highest learning rate."""
    decay_share: float
    """The part of the steps, the last ones, in which the learning rate falls to zero."""
    compiles: bool
    """The transformer is compiled for each size before its first step of that size."""
    reading_steps: int
    """Most steps in which the text encoder of the video model learns to read captions, before the first of `steps`."""

    def plan_rate(self, step: int) -> float:
        """The learning rate of a step."""
        return plan_rate(step, self.steps, self.peak_rate, _WARM_UP, self.decay_share)


def plan_rate(step: int, steps: int, peak: float, warm_up: int = 100, decay_share: float = DECAY_SHARE) -> float:
    """The learning rate of a step: warm up, stay at the peak, and decay linearly to zero over the last part."""
    return peak * min(1.0, (step + 1) / warm_up, (steps - step) / max(decay_share * steps, 1.0))
