"""Cluster files: what is written is what is planned with, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.cluster_file import read_cluster
from profiler.tables.links import DEFAULT_LINKS
from tridentserve.errors import ConfigError

CLUSTERS = Path(__file__).parents[2] / "deployments" / "clusters"
GROUP = "nodes: 2\ngpus_per_node: 2\ngpu: L20\nmemory_gb: 48\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_one_group(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, GROUP + "inter_node_gb_s: 5\n"))
    workers = cluster.list_workers()
    assert [worker.worker_id for worker in workers] == ["n0w0", "n0w1", "n1w0", "n1w1"]
    assert {worker.memory_bytes for worker in workers} == {48 * 10**9}
    assert (workers[3].node_id, workers[3].device, cluster.gpu) == ("n1", "L20", "L20")
    links = cluster.override_links(DEFAULT_LINKS)
    assert links.inter_node_bytes_per_s == 5e9
    assert links.host_bytes_per_s == DEFAULT_LINKS.host_bytes_per_s


def test_several_groups(tmp_path: Path) -> None:
    group = "- {nodes: %d, gpus_per_node: %d, gpu: L20, memory_gb: 48}\n"
    groups = group % (1, 2) + group % (2, 1)
    names = [worker.worker_id for worker in read_cluster(write(tmp_path, groups)).list_workers()]
    assert names == ["n0w0", "n0w1", "n1w0", "n2w0"]
    keyed = "groups:\n" + groups + "host_gb_s: 20\n"
    cluster = read_cluster(write(tmp_path, keyed))
    assert [worker.worker_id for worker in cluster.list_workers()] == names
    assert cluster.override_links(DEFAULT_LINKS).host_bytes_per_s == 20e9


@pytest.mark.parametrize(("name", "workers"), [("l20-128.yaml", 128), ("l20-8.yaml", 8)])
def test_shipped_clusters_can_be_read(name: str, workers: int) -> None:
    assert len(read_cluster(CLUSTERS / name).list_workers()) == workers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GROUP.replace("nodes: 2", "nodes: 0"), r"c.yaml: nodes: Input should be greater than or equal to 1"),
        (GROUP.replace("node: 2", "node: 0"), r"gpus_per_node: Input should be greater"),
        (GROUP.replace("48", "-48"), r"memory_gb: Input should be greater than 0"),
        (GROUP.replace("48", ".nan"), r"memory_gb: "),
        (GROUP.replace("gpu: L20\n", ""), r"c.yaml: gpu: Field required"),
        (GROUP + "colour: red", r"colour: unknown key; check its spelling"),
        (GROUP + "host_gb_s: 0", r"host_gb_s: Input should be greater than 0"),
        ("groups: []", r"groups: "),
        ("groups: [{nodes: 1}]", r"groups.0.gpus_per_node: Field required"),
        ("[]", r"groups: "),
        ("7", r"must be a mapping with the keys nodes, gpus_per_node"),
        ("{", r"cannot be read as YAML"),
        (
            "[{nodes: 1, gpus_per_node: 1, gpu: A, memory_gb: 1}, {nodes: 1, gpus_per_node: 1, gpu: B, memory_gb: 1}]",
            r"several kinds of GPU \(A, B\)",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read"):
        read_cluster(tmp_path / "none.yaml")
