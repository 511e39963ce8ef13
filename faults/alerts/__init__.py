"""alerts: a run's events file, watched by rules, and what happens is told to people and to Alertmanager.

`load_rules` reads what to watch for, `AlertEngine` decides (pure, with an injected clock), `Tail`
follows the file, and `AlertWatcher` joins them with sinks inside a running program. It reads events
and nothing else, so the same rules work live, over an old file, and over a file of another process.
"""

from faults.alerts.engine import Alert, AlertEngine, Change
from faults.alerts.http_sinks import Alertmanager, Webhook, build_sinks
from faults.alerts.rules import RuleFile, default_rules, load_rules, parse_rules
from faults.alerts.sinks import Sink, Terminal
from faults.alerts.watcher import AlertWatcher

__all__ = [
    "Alert",
    "AlertEngine",
    "AlertWatcher",
    "Alertmanager",
    "Change",
    "RuleFile",
    "Sink",
    "Terminal",
    "Webhook",
    "build_sinks",
    "default_rules",
    "load_rules",
    "parse_rules",
]
