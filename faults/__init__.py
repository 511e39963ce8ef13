"""faults: what a failure means, and what to do about it.

`classify` turns an exception of any shape into a `Fault` (kind, code, who is at fault, what is known
of the outcome), `decide` turns a fault into a `Decision`. Both are pure functions over tables that
can be read at a glance. The inner room `faults.alerts` turns a run's events into alerts.
"""

from faults.classify import classify, classify_status, classify_text, name_of
from faults.decide import Backoff, decide
from faults.fault import Action, Blame, Decision, Fault, Kind, Outcome
from faults.retry import retrying

__all__ = [
    "Action",
    "Backoff",
    "Blame",
    "Decision",
    "Fault",
    "Kind",
    "Outcome",
    "classify",
    "classify_status",
    "classify_text",
    "decide",
    "name_of",
    "retrying",
]
