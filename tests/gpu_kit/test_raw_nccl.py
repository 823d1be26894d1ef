"""The kit's calls of NCCL's own functions, with a library that takes them as ``nccl.h`` declares them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.raw_nccl import RawNccl

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { int rank, size; } Comm;
typedef struct { char internal[128]; } ncclUniqueId;
static Comm *made(int rank, int size) { Comm *c = malloc(sizeof *c); c->rank = rank; c->size = size; return c; }
int ncclGetUniqueId(ncclUniqueId *id) { memset(id->internal, 0, 128); id->internal[1] = 7; id->internal[127] = 9; return 0; }
int ncclCommInitRank(Comm **c, int size, ncclUniqueId id, int rank) {
    if (id.internal[1] != 7 || id.internal[127] != 9) return 4;
    *c = made(rank, size); return 0;
}
int ncclCommShrink(Comm *of, int *excluded, int count, Comm **c, void *config, int flags) {
    if (config || flags) return 4;
    int rank = of->rank;
    for (int i = 0; i < count; i++) { if (excluded[i] == of->rank) return 5; if (excluded[i] < of->rank) rank--; }
    *c = made(rank, of->size - count); return 0;
}
int ncclCommSplit(Comm *of, int color, int key, Comm **c, void *config) {
    if (config || color != 0) return 4;
    *c = made(key, of->size); return 0;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *c, void *stream) {
    if (type != 2 || stream) return 4;
    memcpy((char *)to + c->rank * count * 4, from, count * 4); return 0;
}
int ncclCommDestroy(Comm *c) { free(c); return 0; }
"""


@pytest.fixture
def nccl(tmp_path: Path) -> RawNccl:
    (tmp_path / "nccl.c").write_text(SOURCE)
    library = tmp_path / "libnccl.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nccl.c")], check=True)
    return RawNccl(ctypes.CDLL(str(library)))


def test_a_lost_rank_is_taken_over_by_the_spare_in_its_place(nccl: RawNccl) -> None:
    world_and_spare = nccl.connect(nccl.unique_id(), 4, 3)  # this is the spare, and rank 1 is lost
    others = world_and_spare.without([1])
    ordered = others.ordered(1)
    send, receive = (ctypes.c_int * 2)(41, 42), (ctypes.c_int * 6)()
    others.gather(ctypes.addressof(send), ctypes.addressof(receive), 2, 0)
    assert list(receive) == [0, 0, 0, 0, 41, 42], "shrunk: the last of three"
    ordered.gather(ctypes.addressof(send), ctypes.addressof(receive), 2, 0)
    assert list(receive) == [0, 0, 41, 42, 41, 42], "split: the rank that was lost"
    for one in (ordered, others, world_and_spare):
        one.drop()


def test_what_nccl_refuses_is_raised(nccl: RawNccl) -> None:
    whole = nccl.connect(nccl.unique_id(), 4, 1)
    with pytest.raises(RuntimeError, match="ncclCommShrink gives 5"):
        whole.without([1])
    whole.drop()
    with pytest.raises(RuntimeError, match="ncclCommInitRank gives 4"):
        nccl.connect(bytes(128), 4, 0)


def test_what_a_library_does_not_have_is_named(nccl: RawNccl) -> None:
    assert nccl.lacks("ncclCommShrink", "ncclCommAbort", "ncclCommGrow") == ["ncclCommAbort", "ncclCommGrow"]
