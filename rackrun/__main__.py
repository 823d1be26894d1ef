"""``python -m rackrun`` is ``rackrun``."""

from rackrun.launcher import run

if __name__ == "__main__":
    run()
