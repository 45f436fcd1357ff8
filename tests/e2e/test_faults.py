"""Clients that leave, requests that are deleted, workers that are killed: the others lose nothing, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.e2e.conftest import Service, decode_image
from tests.support import http
from tests.support.processes import started
from tests.support.waiting import PATIENCE_S, wait_until

# More than any test waits for.
LONG_STEPS = 900


def worker_handles() -> dict[str, Any]:
    """The live stage workers of the service, by id."""
    import ray
    from ray.util.state import list_actors

    alive = [
        (actor.repr_name or "", actor)
        for actor in list_actors(address=ray.get_runtime_context().gcs_address, detail=True)
        if actor.class_name == "StageWorker" and actor.state == "ALIVE"
    ]
    return {name.split("(")[1].split(",")[0]: actor for name, actor in alive if "(n0w" in name}


def service_processes() -> dict[str, int]:
    """The ids of the processes of live actors, by the names of their classes."""
    import ray
    from ray.util.state import list_actors

    actors = list_actors(address=ray.get_runtime_context().gcs_address, detail=True)
    return {actor.class_name: actor.pid for actor in actors if actor.state == "ALIVE" and actor.pid is not None}


def long_request(request_id: str) -> dict[str, Any]:
    return {
        "model": "tiny-flux",
        "prompt": "long",
        "size": "256x256",
        "num_inference_steps": LONG_STEPS,
        "request_id": request_id,
    }


def running(service: Service, request_id: str) -> bool:
    """A denoising plan of this request has been given out."""
    return any(
        effect["kind"] == "run"
        and "diffuse" in effect["plan"]["stages"]
        and any(member["request_id"].startswith(request_id + "~") for member in effect["plan"]["members"])
        for decision in service.decisions()
        for effect in decision["effects"]
    )


def stopped(service: Service, request_id: str) -> bool:
    """This request was cancelled, the plan that ran for it then was aborted, and all its plans have ended: that one was
    stopped, has failed (one of several workers that was to stop before it had its inputs), or had just done its
    steps, which were not the last of the request."""
    mine = request_id + "~"
    running, whole = set[int](), set[int]()
    aborted = was_cancelled = False
    for decision in service.decisions():
        event, effects = decision["event"], decision["effects"]
        if event["kind"] in ("plan_stopped", "plan_failed", "stage_finished"):
            assert event["kind"] != "stage_finished" or event["plan_id"] not in whole, "its last step was done"
            running.discard(event["plan_id"])
        for effect in effects:
            if effect["kind"] == "run" and (steps := list_steps(effect["plan"], mine)) is not None:
                running.add(effect["plan"]["plan_id"])
                whole |= {effect["plan"]["plan_id"]} if steps[1] == LONG_STEPS else set()
        if any(effect["kind"] == "reject" and effect["request_id"].startswith(mine) for effect in effects):
            was_cancelled = True
            aborted = running <= {effect["plan_id"] for effect in effects if effect["kind"] == "abort"}
    return was_cancelled and aborted and not running


def list_steps(plan: dict[str, Any], mine: str) -> list[int] | None:
    """The first step and the end of a request's denoising in a plan; zeros where it has none, None where the plan is
    not of this request."""
    found = [member["steps"] or [0, 0] for member in plan["members"] if member["request_id"].startswith(mine)]
    return found[0] if found else None


def wait_for_stop(service: Service, request_id: str) -> None:
    def tell() -> str:
        lines = (json.dumps(decision) for decision in service.decisions())
        return "\n".join(line for line in lines if f"{request_id}~" in line or '"plan_' in line)

    wait_until(lambda: stopped(service, request_id), "the request has stopped before its last step", tell=tell)


def test_delete_stops_a_request_within_a_step(service: Service) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, f"{service.url}/v1/images/generations", json=long_request("del"))
        wait_until(lambda: running(service, "del"), "the request runs")
        assert http.delete(f"{service.url}/v1/requests/del").status_code == 200
        answer = waiting.result(timeout=PATIENCE_S)
    assert answer.status_code == 499
    assert answer.json()["error"]["code"] == "cancelled"
    wait_for_stop(service, "del")
    assert http.delete(f"{service.url}/v1/requests/del").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_request(service: Service, stream: bool) -> None:
    request_id = f"gone-{stream}"
    body = json.dumps({**long_request(request_id), "stream": stream})
    command = ["curl", "-sN", f"{service.url}/v1/images/generations", "-H", "Content-Type: application/json"]
    with started([*command, "-d", body]):
        wait_until(lambda: running(service, request_id), "the request runs")
    wait_for_stop(service, request_id)


def test_a_client_that_sends_its_body_apart_and_leaves_stops_its_request(service: Service) -> None:
    """As httpx and the clients on top of it do, unlike curl."""
    body = json.dumps(long_request("apart")).encode()
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.1)
        client.sendall(body)
        wait_until(lambda: running(service, "apart"), "the request runs")
    wait_for_stop(service, "apart")


def test_a_replica_of_api_that_is_killed_leaves_no_request_behind(service: Service) -> None:
    with ThreadPoolExecutor(1) as pool:
        # So large that no machine is done before the scheduler gives up waiting for somebody to join it.
        body = {**long_request("orphan"), "size": "512x512"}
        waiting = pool.submit(http.post, f"{service.url}/v1/images/generations", json=body)
        wait_until(lambda: running(service, "orphan"), "the request runs")
        (api,) = [pid for name, pid in service_processes().items() if name.endswith(":Api")]
        os.kill(api, signal.SIGKILL)
        assert waiting.result(timeout=PATIENCE_S).status_code >= 500
    wait_for_stop(service, "orphan")
    wait_until(lambda: http.get(f"{service.url}/health").status_code == 200, "there is another replica")


def test_the_same_request_id_joins(service: Service) -> None:
    body: dict[str, Any] = {
        "model": "tiny-sd3",
        "prompt": "once",
        "size": "64x64",
        "num_inference_steps": 8,
        "request_id": "same",
    }
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: service.generate(**body), range(3)))
    answers.append(service.generate(**body))
    assert len({answer["data"][0]["b64_json"] for answer in answers}) == 1
    assert sum("same~" in json.dumps(decision["event"]) for decision in service.decisions()) == 1
    other = http.post(f"{service.url}/v1/images/generations", json={**body, "prompt": "another"})
    assert other.status_code == 422


def test_a_killed_worker_costs_no_request(service: Service) -> None:
    """SIGKILL a denoiser while requests run on it: all complete, and it comes back."""
    victim, before = worker_handles()["n0w1"], len(service.decisions())

    def victim_denoises() -> bool:
        effects = (effect for decision in service.decisions()[before:] for effect in decision["effects"])
        plans = (effect["plan"] for effect in effects if effect["kind"] == "run")
        return any("diffuse" in plan["stages"] and "n0w1" in plan["workers"] for plan in plans)

    def is_back() -> bool:
        worker = worker_handles().get("n0w1")
        return worker is not None and worker.pid != victim.pid

    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(
                service.generate, model="tiny-flux", prompt="kill", size="128x128", num_inference_steps=40, seed=5
            )
            for _ in range(4)
        ]
        wait_until(victim_denoises, "it denoises")
        os.kill(victim.pid, signal.SIGKILL)
        answers = [one.result(timeout=PATIENCE_S) for one in asked]
    assert len({answer["data"][0]["b64_json"] for answer in answers}) == 1 or all(
        np.abs(
            decode_image(a["data"][0]["b64_json"]).astype(int)
            - decode_image(answers[0]["data"][0]["b64_json"]).astype(int)
        ).max()
        <= 1
        for a in answers
    )
    assert any(decision["event"]["kind"] == "worker_lost" for decision in service.decisions())
    wait_until(is_back, "another process takes its place")
    wait_until(lambda: http.get(f"{service.url}/health").json()["workers"] == 4, "the worker is back")


def metrics_text(ray: Any) -> str:
    """The text that Prometheus would scrape from Ray."""
    port = ray.nodes()[0]["MetricsExportPort"]
    return http.get(f"http://{ray.util.get_node_ip_address()}:{port}/metrics").text


def test_metrics_are_exported(service: Service) -> None:
    import ray

    names = (
        "stage_seconds_bucket",
        "stage_runs_total",
        "queue_length",
        "slo_total",
        "requests_total",
        "request_latency_seconds_bucket",
        "handoff_bytes_total",
        "handoff_used_bytes",
        "workers_alive",
        "replica_loads_total",
        "replica_bytes",
        "plan_peak_bytes",
    )

    def missing() -> list[str]:
        text = metrics_text(ray)
        return [name for name in names if f"\nray_tridentserve_{name}{{" not in text]

    service.generate(model="tiny-flux", prompt="measured", size="64x64", num_inference_steps=2)
    wait_until(lambda: not missing(), "all metrics are there")  # Ray's processes report every few seconds.


def test_nothing_is_left_in_the_handoff_buffers(service: Service) -> None:
    import ray

    def levels() -> list[float]:
        lines = metrics_text(ray).splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("ray_tridentserve_handoff_parcels{")]

    service.generate(model="tiny-flux", prompt="the last one", size="64x64", num_inference_steps=2)
    wait_until(lambda: bool(levels()) and not any(levels()), "all parcels are dropped")
