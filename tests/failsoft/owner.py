"""A program that owns one engine and says so: its guard, its marker. It ends when it is killed."""

import asyncio
import json
import sys

from dispatch.engines.child.process import EngineProcess


async def main() -> None:
    engine = await EngineProcess.spawn(sys.argv[1:])
    print(json.dumps({"guard": engine.guard_pid, "marker": engine.marker, "engine": engine.pid}), flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
