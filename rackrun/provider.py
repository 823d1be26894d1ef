"""Types for providers, from which a job requests additional racks.

Importable without torch; `docs/providers.md` explains providers.

``rackrun --provider module:function`` calls ``function()`` once, in a process of its own. It returns a `Provider`.
"""

from __future__ import annotations

from rackrun.coordinator.user_code.provider_api import Provider, RackRequest, Refused

__all__ = ["Provider", "RackRequest", "Refused"]
