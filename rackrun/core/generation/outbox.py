"""The outbox: the commands that follow from the event that is being handled, in order, each with the rule that sent
it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.protocol.commands import Command, StopJob

__all__ = ["Outbox"]


@dataclass(slots=True)
class Outbox:
    """Collects the commands of one event. All parts of the core share it."""

    rule: str = ""
    """The rule that is being applied, by the name that it has in its table (`rackrun.core.machine`): a type of event,
    timer or fact, or a condition that is looked at after every event."""
    sent_by: tuple[str, ...] = ()
    """The rules that sent the commands which `take` returned last, in their order."""
    _commands: list[Command] = field(default_factory=list)
    _rules: list[str] = field(default_factory=list)

    def emit(self, command: Command) -> None:
        """Add a command, sent by `rule`."""
        self._commands.append(command)
        self._rules.append(self.rule)

    def take(self) -> tuple[Command, ...]:
        """Return the commands and empty the outbox. Nothing follows a command that ends the job: one event may give
        several reasons to act, and the later ones no longer matter."""
        if not self._commands:
            return ()
        end = next((at for at, one in enumerate(self._commands) if isinstance(one, StopJob)), len(self._commands))
        commands, self.sent_by = tuple(self._commands[: end + 1]), tuple(self._rules[: end + 1])
        self._commands.clear()
        self._rules.clear()
        return commands
