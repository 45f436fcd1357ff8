"""The table of docs/metrics.md lists all metrics that the code exports."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
START, END = "<!-- table: start -->\n", "<!-- table: end -->\n"
HEADER = "| metric | kind | tags | meaning |\n| --- | --- | --- | --- |\n"
KINDS = {"Counter", "Gauge", "Histogram"}


def metrics() -> list[tuple[str, str, str, str]]:
    """Name, kind, tags and description of every metric that the live engine and the deployments make."""
    found = []
    for folder in ("tridentserve/engine/live", "deployments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "from ray.util.metrics import" not in text:
                continue
            tree = ast.parse(text)
            # Tags that several metrics share stand in a variable.
            shared = {
                target.id: ast.literal_eval(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
                for target in node.targets
                if isinstance(target, ast.Name) and all(isinstance(one, ast.Constant) for one in node.value.elts)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                    name, meaning = (ast.literal_eval(argument) for argument in node.args)
                    tags = next((one.value for one in node.keywords if one.arg == "tag_keys"), ast.Tuple(elts=[]))
                    values = shared[tags.id] if isinstance(tags, ast.Name) else ast.literal_eval(tags)
                    found.append((name, node.func.id.lower(), ", ".join(values), meaning))
    return sorted(found)


def test_the_table_lists_all_metrics() -> None:
    rows = [f"| `ray_{name}` | {kind} | {tags} | {text} |\n" for name, kind, tags, text in metrics()]
    there = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    table = HEADER + "".join(rows)
    assert there == table, f"put this into {PAGE}:\n{table}"


def test_every_metric_has_the_prefix_and_a_sentence() -> None:
    found = metrics()
    assert len(found) > 20
    assert all(name.startswith("tridentserve_") and text.endswith(".") for name, _, _, text in found)
    assert len({name for name, *_ in found}) == len(found)
