"""The models of several cells together: each once, the configuration's first model first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from deployments.model_updates.catalogue import Catalogue
from deployments.model_updates.catalogue_client import CatalogueClient, CombinedCatalogue
from deployments.models.served import ServedModel
from tests.deployments.fake_backend import WITH_VIDEOS
from tests.support.waiting import until

SD3, FLUX, WAN = (WITH_VIDEOS[name] for name in ("tiny-sd3", "tiny-flux", "tiny-wan"))


class PublishingCell:
    """The catalogue of a cell, which changes when it is told to."""

    def __init__(self, *models: ServedModel) -> None:
        self.models = models
        self.is_lost = False

    async def poll(self, known_version: str | None, timeout_s: float) -> Catalogue:
        await asyncio.sleep(0.005)
        if self.is_lost:
            raise RuntimeError("the cell is lost")
        return Catalogue(str(self.models), self.models)


def is_listed(combined: Mapping[str, ServedModel], *names: str) -> bool:
    return list(combined) == list(names) and len(combined) == len(names)


async def test_models_of_some_cells_are_served_and_a_lost_cell_keeps_its_own() -> None:
    cells = [PublishingCell(SD3, WAN), PublishingCell(SD3, FLUX)]
    clients = [CatalogueClient(cell.poll, ()) for cell in cells]
    combined = CombinedCatalogue(clients)
    assert is_listed(combined)
    combined.follow()
    await until(lambda: is_listed(combined, "tiny-sd3", "tiny-wan", "tiny-flux"))
    assert combined["tiny-flux"] is FLUX
    assert "another" not in combined
    cells[0].is_lost, cells[1].models = True, (SD3,)
    await until(lambda: is_listed(combined, "tiny-sd3", "tiny-wan"))
    for client in clients:
        client.stop()
