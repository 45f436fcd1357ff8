#!/usr/bin/env python3
"""Fetch a model of the Hugging Face hub into a folder, for a machine without a connection, and print what to write in
the configuration. A fetch that was cut goes on where it was when the command is run again.

Example: python scripts/fetch_model.py black-forest-labs/FLUX.1-schnell --to models/flux-schnell
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from lib.command_line import Parser

from deployments.replica_logs import prepare_logs
from tridentserve.errors import ModelFolderError
from tridentserve.hub.fetching import fetch_to_cache, fetch_to_folder
from tridentserve.hub.hub_model import DEFAULT_REVISION, HubModel, is_hub_id


def main() -> int:
    parser = Parser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", metavar="ID", help="its id, such as black-forest-labs/FLUX.1-schnell")
    parser.add_argument(
        "--revision", default=DEFAULT_REVISION, help="a branch, a tag or a commit (default: %(default)s)"
    )
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="without it into the hub's cache (HF_HOME)")
    arguments = parser.parse_args()
    if not is_hub_id(arguments.model):
        parser.error(f"{arguments.model!r} is no id of a model: an owner and a name, with a slash between them")
    prepare_logs()
    model = HubModel(arguments.model, arguments.revision)
    try:
        pinned = fetch_to_folder(model, arguments.to) if arguments.to else fetch_to_cache(model).model
    except ModelFolderError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch_model: ended; the next call goes on from there", file=sys.stderr)
        return 130
    print("Write in the configuration:\n    models:")
    name = model.model_id.partition("/")[2]
    if arguments.to is None:
        print(f"      - {{name: {name}, path: {pinned.model_id}, revision: {pinned.revision}}}")
    else:
        folder = str(arguments.to.resolve())
        text = folder if re.fullmatch(r"[\w./-]+", folder) else json.dumps(folder)  # a comma would end it
        print(f"      - {{name: {name}, path: {text}}}  # {pinned}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
