"""doctor: what on this machine, and on a Ray that can be reached, will make the next start fail.

`finding` is what a check returns, `examine` runs them side by side with a deadline each, `checks` holds one
module a check.
"""
