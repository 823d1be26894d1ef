"""Runs a script that is given as arguments, and destroys its process group at the end.

Without that, a thread of gloo's may still run when the process exits, which then aborts now and then.
"""

import os
import runpy
import sys

import torch

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
