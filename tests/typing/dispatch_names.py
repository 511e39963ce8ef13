"""The types of dispatch's public names. Checked by the type checkers, never run."""

from typing import Any, assert_type

from dispatch import PosterPool, Reply, Request


async def posting() -> None:
    async with PosterPool(concurrency=16, posters_per_node=1, deadline=60.0) as pool:
        assert_type(pool, PosterPool)
        reply = await pool.post("http://h/", {"a": 1}, deadline=30.0, idempotent=True, request_id=None)
        assert_type(reply, Reply)
        assert_type(reply.data, Any)
        assert_type(reply.status, int)
        assert_type(reply.headers, dict[str, str])
        assert_type(reply.via, str)
        assert_type(reply.attempts, int)
        reply.status = 5  # type: ignore[misc]
        await pool.post(5, {})  # type: ignore[arg-type]
        await pool.post("http://h/", {}, deadline="5")  # type: ignore[arg-type]
        async for done in pool.post_many([Request(url="http://h/", payload={})]):
            assert_type(done.reply, Reply | None)
        stats = pool.stats()
        assert_type(stats.submitted, int)
        assert_type(stats.succeeded, int)
        assert_type(stats.failed, int)
        assert_type(stats.cancelled, int)
        assert_type(stats.in_flight, int)
