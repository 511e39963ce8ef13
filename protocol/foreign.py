"""foreign: text that a model, a tool or a server wrote, where it is embedded into ours.

It may hold a token, genuine or forged, and must not pass for a failure of ours; it may hold a prompt,
of which no more is carried than the budget allows (`protocol.safe.PROMPT_BUDGET`); and it may be long.
"""

from __future__ import annotations

from protocol.safe import MAX_TEXT, clean, within_budget
from protocol.token import defuse


def excerpt(text: str | bytes, most: int = MAX_TEXT) -> str:
    """At most ``most`` characters of foreign text, within the prompt budget, scrubbed of secrets and
    without tokens: what may stand in a failure's detail or data."""
    if isinstance(text, bytes):
        text = text[: 4 * 4 * most].decode("utf-8", "replace")  # UTF-8 has up to 4 bytes a character
    return defuse(within_budget(clean(text, most)))
