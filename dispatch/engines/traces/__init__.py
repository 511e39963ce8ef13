"""traces: what a killed tree of processes leaves, found and taken away.

A directory of its own (`private`), shared memory (`shm`), GPU memory (`gpu`), ports: of one engine, by the
guard, or by the owner when that was killed (`owned`); of those that lost their guard as well, later
(`leftovers`). A look that may hang, as in a driver, is made in `aside`.
"""
