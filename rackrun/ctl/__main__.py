"""``python -m rackrun.ctl`` is ``rackctl``."""

from rackrun.ctl.main import main

if __name__ == "__main__":
    main()
