"""doubled.py MODE SCRIPT [ARGUMENTS]: a script whose workers have the double of NCCL's contract for their device. MODE is ``late``, ``stuck`` or ``early``.

rackctl chaos campaign --seeds 0:50 --tally out/late.jsonl -- tests/worker/doubled.py late examples/chaos/small.py {wrap} {reduction} 40 {out}
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from nccl_double import EARLY, MODES, install  # type: ignore[import-not-found]  # it lies beside this script

mode, script, *arguments = sys.argv[1:]
if mode not in (*MODES, EARLY):
    sys.exit(f"the double has the modes {', '.join([*MODES, EARLY])}; there is none called {mode!r}")
sys.argv = [script, *arguments]
sys.path[0] = str(Path(script).parent)
with install(mode):
    runpy.run_path(script, run_name="__main__")
