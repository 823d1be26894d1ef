"""``python3 -m benchmarks.gpu --out DIR``: see docs/gpu_kit.md."""

import sys

from benchmarks.gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
