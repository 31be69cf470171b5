"""The error of a command line that asks for what can't be: exit status 2, where an unreadable run is 3."""

from __future__ import annotations

from ..rankagent.contract import TdbgError


class WrongUse(TdbgError):
    """An unknown metric or incident, or a query that is wrong or wants to write."""
