"""Object stores to try things with: fsspec's own in memory, and a server that speaks S3 over a socket of this host."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rackrun.checkpoint.base.location import RemotePath, parse_location
from rackrun.checkpoint.durable.storage.object_store import ObjectFiles

__all__ = ["BOTH", "end_connections", "kept", "remote", "s3_server"]

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server of S3."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    host, port = process.stdout.readline().split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3", use_listings_cache=False).mkdir("rackrun-test")  # and fsspec's thread begins
        end_connections()
        yield f"http://{host}:{port}"
        end_connections()
    process.stdin.close()
    process.wait()
    process.stdout.close()


def end_connections() -> None:
    import s3fs

    kind: Any = s3fs.S3FileSystem
    for one in list(kind._cache.values()):
        if one._s3 is not None:
            kind.close_session(one.loop, one._s3)
    kind.clear_instance_cache()


BOTH = pytest.mark.parametrize("remote", ["memory", "s3"], indirect=True)


@pytest.fixture
def remote(request: pytest.FixtureRequest, s3_server: str) -> Iterator[RemotePath]:
    """A place of its own, in memory unless the test says `BOTH`."""
    scheme = getattr(request, "param", "memory")
    place = parse_location(f"{scheme}://rackrun-test/{uuid.uuid4().hex}")
    assert isinstance(place, RemotePath)
    yield place
    if scheme == "s3":
        end_connections()
    else:
        store: Any = fsspec.filesystem("memory")
        store.store.clear()
        store.pseudo_dirs[:] = [""]


def kept(place: Path) -> list[str]:
    """All objects below."""
    assert isinstance(place, RemotePath)
    files = ObjectFiles(place.scheme)
    files._fs.invalidate_cache()
    return sorted(str(one).removeprefix("/").removeprefix(place.key + "/") for one in files._fs.find(place.key))
