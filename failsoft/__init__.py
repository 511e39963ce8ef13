"""failsoft: keep serving with what is left, and say exactly what broke.

The front door: the command line (`failsoft.cli`). The names to program with live in their rooms:
``from dispatch import PosterPool``, ``from protocol import coded``, ``from faults import classify``.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
