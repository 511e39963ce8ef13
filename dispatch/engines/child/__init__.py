"""child: one engine as a child process.

A guard stands between the engine and its owner and ends everything below it (`guard`, `process`); its
output is always read (`output`, `log_files`), its ports are its own (`ports`), and whether the OOM killer
ended it is asked of the kernel's counters (`evidence`). What it leaves besides is the business of
`dispatch.engines.traces`.
"""
