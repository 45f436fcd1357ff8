"""Brings a model of the hub to this machine: into the hub's cache, or into a folder for a machine without a connection.

A revision is resolved to its commit first. Settings come before weights, so that a model that cannot be served costs no
gigabytes. Who fetches into a cache holds a lock of the model there: of several processes the others wait, and find all
of it.
"""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, RepoFile, constants, get_cached_repo_tree, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import WeakFileLock, disable_progress_bars

from tridentserve.errors import ModelFolderError
from tridentserve.hub.cached import HubSnapshot, get_cache, require_files
from tridentserve.hub.download import HubFile, compute_digest, download
from tridentserve.hub.fetch_progress import FetchProgress
from tridentserve.hub.hub_model import HubModel
from tridentserve.hub.model_files import ModelFiles, choose_files
from tridentserve.models.model_folder import (
    MODEL_INDEX,
    read_component_classes,
    read_family,
    read_json,
    stage_weights_bytes,
)

# Files that are fetched at once.
_CONNECTIONS = 8

logger = logging.getLogger(__name__)

# Puts files of the repository into the folder in which they are read.
_PutFiles = Callable[[Sequence[HubFile]], None]


def fetch_to_cache(model: HubModel, cache: Path | None = None) -> HubSnapshot:
    """Bring a model into the hub's cache, unless it is there, and compare all its files with their hashes, once. Where
    the hub cannot be reached, what the cache has is used. Raises `ModelFolderError`, which says what to do."""
    disable_progress_bars()
    cache = cache or get_cache()
    with _explain_errors(model):
        snapshot = HubSnapshot(_resolve(model, cache), cache)
        if not snapshot.is_marked():
            snapshot.lock.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(snapshot.lock):
                if not snapshot.is_marked():
                    snapshot.mark(_complete(model, snapshot))
    logger.info("%s is at the commit %s, in %s", model, snapshot.model.revision, snapshot.folder)
    return snapshot


def fetch_to_folder(model: HubModel, folder: Path) -> HubModel:
    """Bring a model into a folder of its own, and return it pinned. What an earlier try has left there is compared
    with its hash and kept. Raises `ModelFolderError`, which says what to do."""
    disable_progress_bars()
    with _explain_errors(model):
        pinned = _resolve(model, get_cache())

        def place(files: Sequence[HubFile]) -> None:
            _download_all(pinned, files, lambda file: folder / file.name)

        _fetch(pinned, folder, place)
    stage_weights_bytes(folder)
    return pinned


def _resolve(model: HubModel, cache: Path) -> HubModel:
    revision = HfApi().resolve_revision(model.model_id, revision=model.revision, cache_dir=cache)
    return replace(model, revision=revision.resolved)


def _complete(model: HubModel, snapshot: HubSnapshot) -> Sequence[str]:
    """Fetch what is missing of a snapshot, and verify all of it; the result has the names of the needed files."""
    try:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        return _fetch_snapshot(snapshot)
    except (httpx2.TransportError, OfflineModeIsEnabled) as error:
        logger.warning("the hub cannot be reached (%s): %s is taken from the cache", error, model)
        try:
            return _verify_cached(snapshot)
        except ModelFolderError as lack:
            raise ModelFolderError(f"{lack}, and the hub cannot be reached ({error}); {_say_way_out(model)}") from None


def _fetch_snapshot(snapshot: HubSnapshot) -> Sequence[str]:
    def place(files: Sequence[HubFile]) -> None:
        """Put the files where huggingface_hub looks before it fetches one; it makes the links."""
        blobs = snapshot.storage / "blobs"
        _download_all(snapshot.model, files, lambda file: blobs / file.digest)
        snapshot_download(
            snapshot.model.model_id,
            revision=snapshot.model.revision,
            cache_dir=snapshot.cache,
            allow_patterns=[glob.escape(file.name) for file in files],
        )
        for file in files:
            _check_digest(snapshot.folder / file.name, file.digest, blobs / file.digest)

    files = _fetch(snapshot.model, snapshot.folder, place)
    stage_weights_bytes(snapshot.folder)
    return files.settings + files.weights


def _fetch(pinned: HubModel, folder: Path, place: _PutFiles) -> ModelFiles:
    listing = {
        entry.path: HubFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in HfApi().list_repo_tree(pinned.model_id, recursive=True, revision=pinned.revision)
        if isinstance(entry, RepoFile)
    }
    if MODEL_INDEX not in listing:
        raise ModelFolderError(
            f"{pinned.model_id} has no {MODEL_INDEX} at this revision, so it is no pipeline of diffusers; look for a "
            "repository of the model in the format of diffusers (the names of many end in -diffusers)"
        )
    place([listing[MODEL_INDEX]])
    chosen = choose_files(listing, read_json(folder / MODEL_INDEX), read_family(folder))
    place([listing[name] for name in chosen.settings])
    read_component_classes(folder)  # raises where it could not be served
    place([listing[name] for name in chosen.weights])
    return chosen


def _download_all(pinned: HubModel, files: Sequence[HubFile], find_target: Callable[[HubFile], Path]) -> None:
    """Download the files that are not there yet, and remove those that are there with another hash. Files of the same
    content may have one target."""
    wanted = {find_target(file): file for file in files}
    absent = [file for path, file in wanted.items() if not _is_there(path, file)]
    progress = FetchProgress(str(pinned), absent)

    def fetch(file: HubFile) -> None:
        url = hf_hub_url(pinned.model_id, file.name, revision=pinned.revision)
        download(url, file, find_target(file), progress.note)
        progress.end_file()

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        try:
            for ended in as_completed([pool.submit(fetch, file) for file in absent]):
                ended.result()
        except BaseException:  # Ctrl-C too: nobody waits for the rest of gigabytes
            progress.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _is_there(path: Path, file: HubFile) -> bool:
    if not path.is_file():
        return False
    if path.stat().st_size == file.size_bytes and compute_digest(path, file.digest) == file.digest:
        return True
    logger.warning("%s is not what the hub announces as %s: it is fetched again", path, file.name)
    path.unlink()
    return False


def _check_digest(path: Path, digest: str, verified: Path | None = None) -> None:
    """Raise `ModelFolderError` unless a file has this hash, as the file `verified` has."""
    if verified is not None and path.samefile(verified):
        return
    if (actual := compute_digest(path, digest)) != digest:
        raise ModelFolderError(
            f"{path} has the hash {actual} instead of {digest}; remove {path.resolve()}, and start again, where the "
            "hub can be reached, to fetch it anew"
        )


def _verify_cached(snapshot: HubSnapshot) -> Sequence[str]:
    """The names of the needed files of a snapshot that something else has fetched. Raises `ModelFolderError` when not
    all of them are there, or where one has another hash than the name of its blob says."""
    require_files(snapshot, [MODEL_INDEX])
    index: Mapping[str, object] = read_json(snapshot.folder / MODEL_INDEX)
    try:
        listing = get_cached_repo_tree(
            snapshot.model.model_id, revision=snapshot.model.revision, cache_dir=snapshot.cache
        )
        names = [file.path for file in listing]
    except CachedRepoTreeNotFoundError:
        names = snapshot.list_files()
    chosen = choose_files(names, index, read_family(snapshot.folder))
    needed = chosen.settings + chosen.weights
    require_files(snapshot, needed)
    for name in needed:
        if digest := snapshot.find_digest(name):
            _check_digest(snapshot.folder / name, digest)
    stage_weights_bytes(snapshot.folder)
    return needed


@contextmanager
def _explain_errors(model: HubModel) -> Iterator[None]:
    """Say in one line what is wrong with a name, a token or the connection, and what to do."""
    page = f"{constants.ENDPOINT}/{model.model_id}"
    try:
        yield
    except GatedRepoError:
        raise ModelFolderError(
            f"{model} needs a consent: agree to its terms at {page}, and set HF_TOKEN to a token of that account where "
            "the service (on other nodes Ray) is started"
        ) from None
    except RepositoryNotFoundError:
        raise ModelFolderError(
            f"{model.model_id} is no folder here, and {constants.ENDPOINT} has no model of this name that it would "
            "show without another token; correct the name, or set HF_TOKEN if the model is private"
        ) from None
    except RevisionNotFoundError:
        raise ModelFolderError(
            f"{page} has no revision {model.revision!r}; take one of its branches, tags or commits"
        ) from None
    except HFValidationError as error:
        raise ModelFolderError(f"{model.model_id!r} is no id of the hub: {error}") from None
    except RevisionResolutionError as error:
        reason = error.__cause__ or error
        raise ModelFolderError(
            f"{model} is not in the hub's cache {get_cache()}, and the hub cannot be reached ({reason}); "
            f"{_say_way_out(model)}"
        ) from None
    except OfflineModeIsEnabled:  # which is an OSError
        raise ModelFolderError(
            f"{model} cannot be fetched while HF_HUB_OFFLINE is set; {_say_way_out(model)}"
        ) from None
    except (HfHubHTTPError, httpx2.HTTPError, LocalEntryNotFoundError) as error:
        raise ModelFolderError(
            f"{model} cannot be fetched: {' '.join(str(error).split())}; correct that, or try again later"
        ) from error
    except json.JSONDecodeError as error:
        raise ModelFolderError(
            f"{constants.ENDPOINT} does not answer as the hub does ({error}); check HF_ENDPOINT"
        ) from error
    except OSError as error:
        raise ModelFolderError(f"{model} cannot be written to the disk: {error}; make room, or set HF_HOME") from error


def _say_way_out(model: HubModel) -> str:
    revision = "" if model.revision == HubModel(model.model_id).revision else f" --revision {model.revision}"
    return (
        f"run `python scripts/fetch_model.py {model.model_id}{revision} --to FOLDER` where it can be, copy the folder "
        "here, and write `path: FOLDER` (if this machine has a connection, unset HF_HUB_OFFLINE)"
    )
