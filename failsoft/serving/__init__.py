"""serving: the work behind ``failsoft engines``.

`service` runs a file's engines, `control` answers for them on a socket, `asking` asks there, `place` is
where that socket is, `view` what a person sees.
"""
