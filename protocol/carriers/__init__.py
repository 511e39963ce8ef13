"""protocol.carriers: the forms that a failure takes on wires that hold no Python object.

An HTTP reply (`http_problem`), a file that a dying child leaves behind (`error_file`), an exit status
(`exit_status`) and a line of a log (`log_line`). Every carrier writes and reads, within a budget of
bytes; reading never raises on what it finds.
"""
