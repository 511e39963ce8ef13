"""routers: where engines are made known to those who send them work, and taken from again.

A `Router` is a list of URLs outside of this process. An engine is added once its canary has passed and
removed before it is stopped. `StaticRouter` is a plain list, also as a file; `SglangRouter` a running
sglang-router.
"""

from dispatch.engines.routers.router import Router
from dispatch.engines.routers.sglang_router import SglangRouter
from dispatch.engines.routers.static import StaticRouter

__all__ = ["Router", "SglangRouter", "StaticRouter"]
