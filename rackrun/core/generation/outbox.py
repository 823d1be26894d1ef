"""The outbox: the commands that follow from the event that is being handled, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.protocol.commands import Command, StopJob

__all__ = ["Outbox"]


@dataclass(slots=True)
class Outbox:
    """Collects the commands of one event. All parts of the core share it."""

    _commands: list[Command] = field(default_factory=list)

    def emit(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def take(self) -> tuple[Command, ...]:
        """Return the commands and empty the outbox. Nothing follows a command that ends the job: one event may give
        several reasons to act, and the later ones no longer matter."""
        if not self._commands:
            return ()
        end = next((at for at, one in enumerate(self._commands) if isinstance(one, StopJob)), len(self._commands))
        commands = tuple(self._commands[: end + 1])
        self._commands.clear()
        return commands
