"""``python -m rackrun`` is ``rackrun``."""

import sys

from rackrun.launcher import main

if __name__ == "__main__":
    sys.exit(main())
