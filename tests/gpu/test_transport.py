"""NIXL between the memories of two processes on one GPU."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

pytest.importorskip("nixl")

from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.transport.nixl_memory import locate_memory

pytestmark = pytest.mark.gpu
NBYTES = 8 << 20
PATIENCE_S = 60.0


def receive(pipe: Connection) -> None:
    slab = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    link = NixlLink("receiver", slab)
    pipe.send(link.address)
    link.add_peer(pipe.recv()).result(PATIENCE_S)
    _, arrived = link.expect(b"note")
    pipe.send("ready")
    arrived.result(PATIENCE_S)
    torch.cuda.synchronize()
    pipe.send(slab.cpu().numpy().tobytes())
    link.close()


def test_bytes_go_from_slab_to_slab(gpu: torch.device) -> None:
    slab = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device=gpu)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    link = NixlLink("sender", slab)
    address = ours.recv()
    ours.send(link.address)
    link.add_peer(address).result(PATIENCE_S)
    assert ours.recv() == "ready"
    torch.cuda.synchronize()
    _, written = link.write(address.name, [(locate_memory(slab), 0)], 0, b"note")
    written.result(PATIENCE_S)
    assert ours.recv() == slab.cpu().numpy().tobytes()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    link.close()
