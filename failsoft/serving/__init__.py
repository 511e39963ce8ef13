"""serving: the work behind ``failsoft engines``.

`service` runs a file's engines, `control` answers for them on a socket, `asking` asks there, `place` is
where that socket is, `view` what a person sees.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LONGEST"]

LONGEST: Final = 1e7
"""The most seconds that an order to a fleet may name; infinity is no JSON."""
