"""``make matrix``: print docs/matrix.md. Status 1 when a cell is wrong."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import ray

from tests.matrix.boundaries import crossings
from tests.matrix.page import fill, page, wrong


def main() -> int:
    """Fill the matrix on a Ray of its own."""
    logging.getLogger("failsoft").setLevel(logging.CRITICAL)  # the servers log each failure
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="failsoft-matrix-") as folder, crossings(Path(folder)) as all_of:
        cells = asyncio.run(fill(all_of))
    ray.shutdown()
    sys.stdout.write(page(cells))
    for place in wrong(cells):
        print(f"wrong: {place}", file=sys.stderr)
    return 1 if wrong(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
