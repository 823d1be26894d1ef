"""Providers: where a job gets another rack. Importable without torch; `docs/providers.md` explains it.

``rackrun --provider module:function`` calls ``function()`` once, in a process of its own, for a `Provider`.
"""

from __future__ import annotations

from rackrun.coordinator.user_code.provider_api import Provider, RackRequest, Refused

__all__ = ["Provider", "RackRequest", "Refused"]
