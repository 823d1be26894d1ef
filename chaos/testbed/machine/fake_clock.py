"""Move the wall clock of single processes, by a library that is loaded before libc and answers in its place.

Only the wall clock moves; monotonic clocks stay as they are, as on a host whose clock is set. Every process with the
library maps a file of its own, ``FOLDER/PID``, which holds the nanoseconds to add.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from rackrun.chaos.testbed.machine.processes import Process

__all__ = ["ClockPages", "can_move", "move"]

FOLDER = "RACKRUN_CHAOS_CLOCKS"
_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <dlfcn.h>

static volatile const int64_t *page;
static char folder[3800];
static int (*real)(clockid_t, struct timespec *);

static void attach(void) {
    char path[4096];
    page = NULL;
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return;
    if (ftruncate(fd, 8) == 0) {
        void *memory = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
        if (memory != MAP_FAILED) page = memory;
    }
    close(fd);
}

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("RACKRUN_CHAOS_CLOCKS");
    if (name == NULL || *name == 0) return;
    snprintf(folder, sizeof folder, "%s", name);
    attach();
    pthread_atfork(NULL, NULL, attach);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (result == 0 && page != NULL && *page != 0 &&
        (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI)) {
        int64_t ns = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + *page;
        at->tv_sec = ns / 1000000000;
        at->tv_nsec = ns % 1000000000;
    }
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *at, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, at) == 0 ? base : 0;
}
"""


def _build(folder: Path) -> Path:
    """Compile the library. Raises ``OSError`` where that is impossible."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("there is no C compiler")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    words = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl", "-lpthread"]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"the clock could not be compiled: {done.stderr.decode(errors='replace').strip()}")
    return library


class ClockPages:
    """The clock pages of one job, one for each process. ``folder`` is created."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._library = _build(folder)

    @property
    def env(self) -> dict[str, str]:
        """The environment for all processes of the job."""
        loaded = os.environ.get("LD_PRELOAD", "")
        return {
            "LD_PRELOAD": " ".join(filter(None, [str(self._library), loaded])),
            FOLDER: str(self.folder.resolve()),
        }

    def path(self, process: Process) -> Path:
        return self.folder.resolve() / str(process.pid)

    def mapped_by(self, process: Process) -> bool:
        """Whether the process reads its wall clock from its page."""
        try:
            return f"{self.path(process)}\n" in Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            return False


def move(page: Path, by_s: float) -> None:
    """Make the clock of the process with this page differ from the true time by ``by_s`` seconds."""
    with page.open("r+b") as file:
        file.write(struct.pack("=q", round(by_s * 1e9)))


@functools.cache
def can_move() -> str:
    """Return why wall clocks cannot be moved here, or "" if they can."""
    with tempfile.TemporaryDirectory(prefix="rackrun-chaos-") as folder:
        try:
            pages = ClockPages(Path(folder) / "clocks")
        except OSError as error:
            return str(error)
        look = "import os, sys, time\nfrom pathlib import Path\nfrom rackrun.chaos.testbed.machine.fake_clock import move\nbefore = time.time()\n"
        look += "move(Path(sys.argv[1]) / str(os.getpid()), 1e6)\nraise SystemExit(time.time() < before + 5e5)\n"
        done = subprocess.run(
            [sys.executable, "-c", look, str(pages.folder)],
            env={**os.environ, **pages.env},
            capture_output=True,
            check=False,
        )
        return "" if done.returncode == 0 else "a library in front of libc does not reach this interpreter"
