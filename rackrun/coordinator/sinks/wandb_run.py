"""``wandb:PROJECT``: a run of Weights & Biases, offline unless the user's environment says otherwise."""

from __future__ import annotations

import os
import re
from typing import Any

from rackrun.coordinator.sinks.sink import Key, Opening, Record

__all__ = ["WandbRun", "run_name"]


class WandbRun:
    """A W&B run. Its id is that of the rackrun run that began the training, so that a resumed job goes on in it."""

    def __init__(self, opening: Opening) -> None:
        self.run = run_name(opening.run_id)
        self._project, self._directory = opening.target, opening.directory
        self._title = opening.run_id
        self._run: Any = None
        self._step = -1

    def begin(self, newest: Key | None, run: str) -> Key | None:
        import wandb

        self.run = run or self.run
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=self._project,
            id=self.run,
            name=os.environ.get("WANDB_NAME", self._title),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # wandb says what is wrong with it
            dir=os.environ.get("WANDB_DIR", self._directory),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        self._step = newest.step if newest is not None else -1
        return newest

    def write(self, record: Record) -> None:
        """Log a record. W&B adds up what one step logs, and takes no earlier step."""
        step = max(record.key.step, 0)
        if step >= self._step:
            self._step = step
            self._run.log(dict(record.values), step=step)

    def flush(self) -> None:
        """Do nothing: wandb's own process has the values, and outlives this one."""

    def rewind(self, step: int) -> str:
        return f"W&B keeps the values of steps {step + 1} to {self._step}, because its steps only increase"

    def close(self) -> str:
        offline, directory = bool(self._run.offline), os.path.dirname(str(self._run.dir))
        self._run.finish()
        return f"the W&B run is on this host; to upload it: wandb sync --append {directory}" if offline else ""


def run_name(run_id: str) -> str:
    """Return a run id in the characters that W&B takes, 128 at most."""
    return re.sub(r"[^\w.-]", "-", run_id)[:128]
