"""``examples/train_stream.py``, in which a rank is lost.

train_stream.py FOLDER WHERE ARGUMENTS...: WHERE is ``RANK:UPDATE``, or "" for nobody: the process that has this rank ends before
it passes its gate, in that update that it makes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_stream.py"
FOLDER, WHERE = Path(sys.argv[1]), sys.argv[2]
made = [0]


def strike(*_: Any) -> None:
    made[0] += 1
    if f"{os.environ['RANK']}:{made[0]}" == WHERE:
        try:
            (FOLDER / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(strike)
sys.argv = [str(EXAMPLE), *sys.argv[3:]]
sys.path.insert(0, str(EXAMPLE.parent))
runpy.run_path(str(EXAMPLE), run_name="__main__")
