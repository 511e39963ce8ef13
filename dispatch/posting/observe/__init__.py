"""observe: what can be seen of a pool.

`stats` is its accounting, `metrics` the same through Ray, `tracing` has a span a POST, and `quiet` tells of
events of which a thousand say no more than twenty.
"""
