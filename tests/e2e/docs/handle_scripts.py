"""The Python handles of the documents as plain scripts: what stands there, and nothing else."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from tests.docs.commands import indented_blocks
from tests.support.processes import output_of

PAGES_WITH_HANDLES = ("README.md", "docs/api.md")
SHOWN_URL = "http://127.0.0.1:8000"


def write_handle_script(page: str, folder: Path, url: str) -> Path:
    """A script of the page's blocks, one after another, for the service at `url`; it prints the id of its request, and
    the updates of a stream."""
    blocks = indented_blocks(page, "handle = serve.get_app_handle")
    streams = indented_blocks(page, "for update in handle")
    assert len(blocks) == 1
    assert len(streams) == (page == "docs/api.md")
    assert all("    ...  #" in block for block in streams)
    assert blocks[0].count(SHOWN_URL) == 1
    shown = [each.replace("    ...  #", "    print(update['type'])  #") for each in streams]
    script = folder / "call.py"
    script.write_text("\n".join([blocks[0].replace(SHOWN_URL, url), "print(result['request_id'])", *shown]))
    return script


def check_handle_script(page: str, folder: Path, environment: Mapping[str, str], url: str) -> str:
    """Run the script of a page where nothing of this repository can be imported, and look at its picture. The result is
    the id of its request."""
    script = write_handle_script(page, folder, url)
    alone = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    printed = output_of([sys.executable, "-W", "ignore", str(script)], folder, alone)
    (saved,) = folder.glob("*.png")
    width, height = Image.open(io.BytesIO(saved.read_bytes())).size
    assert f"{width}x{height}" in script.read_text()
    assert page != "docs/api.md" or printed.split()[-1] == "completed"
    return printed.split()[0]
