"""load: how much is sent, and where to, while servers are slow, full or broken. No Ray, no HTTP.

Each piece stands alone, takes its clock from outside and holds no task: `targets` (how many POSTs a
server gets, and who waits for it) is made of `aimd`, `ejection` and `fair`; beside it `budget` (how
often anything is sent again), `hedge` (when a second copy is worth it), `suspects` (what takes its
server down with it) and `verdicts` (what a failure says about its server).
"""

from dispatch.posting.load.budget import RetryBudget
from dispatch.posting.load.fair import FairQueue
from dispatch.posting.load.hedge import Hedging
from dispatch.posting.load.settings import LoadControl
from dispatch.posting.load.suspects import Deaths, Strikes
from dispatch.posting.load.targets import Ejected, Lease, Targets, TargetStats, Verdict
from dispatch.posting.load.verdicts import verdict_of

__all__ = [
    "Deaths",
    "Ejected",
    "FairQueue",
    "Hedging",
    "Lease",
    "LoadControl",
    "RetryBudget",
    "Strikes",
    "TargetStats",
    "Targets",
    "Verdict",
    "verdict_of",
]
