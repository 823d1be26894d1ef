"""``python -m rackrun.agent CONFIG``: an agent that no launcher forked, such as one that a batch system starts.

CONFIG is a file with an `AgentConfig` as JSON, or ``fd:N``. ``--parent PID``: die with that process, which is our parent.
"""

from __future__ import annotations

import argparse
import os

import msgspec

from rackrun.link.process.process_exit import code_of, end_process
from rackrun.protocol.agent_config import AgentConfig

__all__: list[str] = []


def _main() -> int:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # before numpy and torch are imported: their threads would make forks unsound
    parser = argparse.ArgumentParser(prog="python -m rackrun.agent", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--parent", type=int, default=None)
    arguments = parser.parse_args()
    source = arguments.config
    with open(int(source[3:]) if source.startswith("fd:") else source, "rb") as file:
        config = msgspec.json.decode(file.read(), type=AgentConfig)
    from rackrun.agent.main import run_agent

    return run_agent(config, parent=arguments.parent, standalone=arguments.parent is None)


if __name__ == "__main__":
    try:
        code = _main()
    except SystemExit as stop:  # of argparse
        code = code_of(stop)
    end_process(code)
