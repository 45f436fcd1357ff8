"""The models that lie in the hub's cache on this machine, found without a request: the folder of each, and the mark
that says that all of it is there and was compared with its hashes.

The layout of the cache is huggingface_hub's: `blobs` has each file under its hash, `snapshots` a folder of links for
each commit, `refs` the last commit known of each branch. The mark has the size and the time of each file, so that a
start need not read gigabytes to know that nothing has changed since.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from tridentserve.errors import ModelFolderError
from tridentserve.hub.hub_model import HubModel

_MARKS = "tridentserve"
# The names of blobs that are hashes of their content: SHA-256 (LFS), or git's SHA-1.
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """A model at one commit in the cache of a machine."""

    model: HubModel
    """The revision is the commit."""
    cache: Path

    @property
    def storage(self) -> Path:
        """The directory of the model in the cache, with all commits of it."""
        return self.cache / f"models--{self.model.model_id.replace('/', '--')}"

    @property
    def folder(self) -> Path:
        """The model folder."""
        return self.storage / "snapshots" / self.model.revision

    @property
    def lock(self) -> Path:
        """The file whose lock has whoever fetches the model to this machine."""
        return self.cache / ".locks" / self.storage.name / "tridentserve.lock"

    @property
    def _mark(self) -> Path:
        return self.storage / _MARKS / f"{self.model.revision}.json"

    def mark(self, names: Collection[str]) -> None:
        """Remember that these files are all that is needed, and that their hashes are right."""
        try:
            self._mark.parent.mkdir(exist_ok=True)
            draft = self._mark.with_suffix(".draft")
            draft.write_text(json.dumps({name: self._describe(name) for name in sorted(names)}, indent=1))
            draft.replace(self._mark)
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next start reads all files again", self._mark, error)

    def is_marked(self) -> bool:
        """True if the files that were marked are there as they were."""
        try:
            marked = json.loads(self._mark.read_text(encoding="utf-8"))
            return bool(marked) and all(self._describe(name) == facts for name, facts in marked.items())
        except (OSError, ValueError, AttributeError):
            return False

    def _describe(self, name: str) -> list[int]:
        facts = (self.folder / name).stat()
        return [facts.st_size, facts.st_mtime_ns]

    def list_files(self) -> list[str]:
        """The names of the files in the folder, whether or not all are needed."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in found]

    def find_digest(self, name: str) -> str | None:
        """The hash that a file should have by the name of its blob; None where the cache has no links."""
        path = self.folder / name
        blob = path.readlink().name if path.is_symlink() else ""
        return blob if _DIGEST.fullmatch(blob) else None


def find_cached(model: HubModel, cache: Path | None = None) -> Path | None:
    """The folder of a model that was fetched and verified on this machine; None where it is yet to be fetched."""
    cache = cache or get_cache()
    snapshot = HubSnapshot(model, cache)
    if not model.is_pinned:
        try:
            commit = (snapshot.storage / "refs" / model.revision).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        snapshot = HubSnapshot(HubModel(model.model_id, commit), cache)
    return snapshot.folder if snapshot.is_marked() else None


def get_cache() -> Path:
    """The hub's cache, by the variables that huggingface_hub reads (`HF_HUB_CACHE`, `HF_HOME`)."""
    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def require_files(snapshot: HubSnapshot, names: Collection[str]) -> None:
    """Raise `ModelFolderError` unless these files are in the folder."""
    if absent := sorted(name for name in names if not (snapshot.folder / name).is_file()):
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise ModelFolderError(f"{snapshot.folder} lacks {', '.join(absent[:3])}{more}")
