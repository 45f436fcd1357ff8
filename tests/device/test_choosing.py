"""The device that is chosen where a GPU may be there or not."""

from __future__ import annotations

import pytest

from tridentserve.device import DEVICE_CHOICES, choose_device, find_device
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.errors import ConfigError


@pytest.mark.parametrize("choice", DEVICE_CHOICES)
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_gpu_is_chosen_where_there_is_one(choice: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "count_devices", lambda device: gpus)
    if choice == "cuda" and not gpus:
        with pytest.raises(ConfigError, match=r"device cuda: torch finds no GPU here; choose cpu or auto, or install"):
            choose_device(choice)
        return
    expected = "cpu" if choice == "cpu" or not gpus else "cuda"
    assert choose_device(choice) is find_device(expected)
