"""The LoRAs that were added to those of the model folders while a service runs, and those that were removed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from deployments.models.served import ServedModel
from tridentserve.errors import ConfigError
from tridentserve.models.lora_files import SUFFIX, LoraFile

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _LoraRecord:
    """The changes, as the file of a registry has them."""

    added: list[LoraFile] = field(default_factory=list)
    removed: list[tuple[str, str]] = field(default_factory=list)
    """Models and names of LoRAs of model folders that are not offered any more."""


_RECORD: TypeAdapter[_LoraRecord] = TypeAdapter(_LoraRecord)


class LoraRegistry:
    """Lives in the Scheduler's event loop. Only names come and go: a request that has been accepted has its files."""

    def __init__(self, file: Path | None) -> None:
        """`file` outlives the Scheduler; None: the changes do not. Raises `ConfigError` for a file of another kind."""
        self._file = file
        self._record = _LoraRecord()
        if file is not None and file.is_file():
            try:
                self._record = _RECORD.validate_json(file.read_bytes())
            except (OSError, ValidationError) as error:
                raise ConfigError(f"loras_file: {file} cannot be read as a list of LoRAs: {error}") from None

    def apply(self, served: ServedModel) -> ServedModel:
        """The model with the LoRAs that requests may name now."""
        own = [lora for lora in served.loras if (lora.model, lora.name) not in self._record.removed]
        added = [lora for lora in self._record.added if lora.model == served.name]
        by_name = {lora.name: lora for lora in (*own, *added)}
        return replace(served, loras=tuple(by_name[name] for name in sorted(by_name)))

    def add(self, lora: LoraFile) -> None:
        """Offer a LoRA, in place of one of its name that was removed."""
        self._record.added.append(lora)
        self._save()

    def remove(self, lora: LoraFile) -> None:
        """Offer a LoRA no more."""
        if lora in self._record.added:
            self._record.added.remove(lora)
        else:
            self._record.removed.append((lora.model, lora.name))
        self._save()

    def forget(self, model: str) -> None:
        """A model has been removed, and with it all that was changed of its LoRAs."""
        before = len(self._record.added) + len(self._record.removed)
        self._record.added = [lora for lora in self._record.added if lora.model != model]
        self._record.removed = [(name, lora) for name, lora in self._record.removed if name != model]
        if len(self._record.added) + len(self._record.removed) != before:
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        new = self._file.with_name(f"{self._file.name}.new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(_RECORD.dump_json(self._record, indent=1))
            new.replace(self._file)
        except OSError as error:  # the change is in force, and lasts until the next start
            logger.error("the LoRAs cannot be written to %s: %s", self._file, error)


def find_file(path: str) -> Path:
    """The file that a path names: itself, or the only one in a directory. Raises `ConfigError`."""
    given = Path(path)
    if not given.is_absolute():
        raise ConfigError("must be an absolute path, the same on all nodes")
    files = sorted(given.glob(f"*{SUFFIX}")) if given.is_dir() else [given]
    if len(files) != 1:
        raise ConfigError(f"is a directory with {len(files)} files *{SUFFIX}; name one of them")
    if files[0].suffix != SUFFIX:
        raise ConfigError(f"must end in {SUFFIX}: no other files are read")
    if not files[0].is_file():
        raise ConfigError("there is no such file on the node of the Scheduler")
    return files[0]
