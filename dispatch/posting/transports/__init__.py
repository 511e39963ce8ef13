"""transports: one HTTP exchange, judged, and what carries it.

`transport` judges the exchange; `client` makes it, over one of three carriers: `aiohttp_transport` (the
default), `httpx_transport` and `reqwest_transport`. `descriptors` sees that the process may open as many
connections as it will need.
"""
