"""protocol: what a failure is called, on every wire.

A failure keeps its name across every boundary it crosses: actor, process, HTTP, log line. This
room holds the names (codes and their catalogue), the one exception that carries them, the token
for places where only text survives, and the events. It imports nothing of ours.
"""

from protocol.boundary import coded
from protocol.catalogue import catalogue
from protocol.codes import Code, Family
from protocol.errors import CodedError
from protocol.events import Events
from protocol.reading import Reading, code_of, read
from protocol.token import Trust, defuse, mint, scan

__all__ = [
    "Code",
    "CodedError",
    "Events",
    "Family",
    "Reading",
    "Trust",
    "catalogue",
    "code_of",
    "coded",
    "defuse",
    "mint",
    "read",
    "scan",
]
