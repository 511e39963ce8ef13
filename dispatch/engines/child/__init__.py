"""child: one engine as a child process, and everything that it could leave behind.

A guard stands between the engine and its owner and ends everything below it (`guard`, `process`); its
output is always read (`output`), its ports are its own (`ports`), and what a killed tree leaves is found
and taken away: by the guard, or by the owner when that was killed (`traces`: a directory of its own,
`private`, shared memory, `shm`, GPUs, `gpu`), or later when both were (`leftovers`).
"""
