"""transports: one HTTP exchange, judged, and what carries it.

`transport` has the client and the judgement; `aiohttp_transport` is the default carrier; `descriptors` sees
that the process may open as many connections as it will need.
"""
