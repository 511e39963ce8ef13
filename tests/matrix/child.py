"""``python -m tests.matrix.child SHAPE [BOUNDARY ...]``: a child process that fails with that shape, on the
far side of those boundaries if there are any."""

from __future__ import annotations

import sys

from tests.matrix.shapes import fail


def main(shape: str, *boundaries: str) -> None:
    if boundaries:
        from tests.matrix.chains import go  # here, for most children need no Ray

        go(boundaries, shape)
    fail(shape)


if __name__ == "__main__":  # processes of a pool import this module, too
    main(*sys.argv[1:])
