"""chaos: breaking it on purpose, and checking what held.

So far the injectors: real signals to real processes, used by ``make rollout`` and by tests/chaos.
"""

from chaos.injectors import Injury, Victim, strike

__all__ = ["Injury", "Victim", "strike"]
