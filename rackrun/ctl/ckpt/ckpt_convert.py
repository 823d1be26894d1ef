"""``rackctl ckpt convert``: writes a checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from rackrun.checkpoint.base.location import absolute, is_remote
from rackrun.checkpoint.durable.durable_manifest import checkpoint_number
from rackrun.checkpoint.offline.directory_survey import one_store
from rackrun.ctl.ckpt.ckpt_render import amount, print_json
from rackrun.ctl.ckpt.export_names import model_names
from rackrun.errors import UsageError

__all__ = ["convert"]

_LAYOUTS = ("rackrun", "dcp", "hf")


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A job's directory or one checkpoint of it, a plain DCP, or a safetensors set."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Directory to create; with --to rackrun, a job's directory.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="LAYOUT", help="Layout to write: rackrun, dcp (torch's own) or hf (Hugging Face's)."
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="Convert all tensors, with their names.")] = False,
    module: Annotated[
        str | None,
        typer.Option(
            "--module", metavar="NAME", help="The module to convert: its name, or NAME.PART for a part of it."
        ),
    ] = None,
    file_gb: Annotated[
        float, typer.Option("--file-gb", min=0.001, help="Largest size of a file of a set, in GB.")
    ] = 5.0,
    unsafe_pickle: Annotated[
        bool, typer.Option("--unsafe-pickle", help="Read pickles. Whoever wrote them can run any code as you.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert a checkpoint to another layout, bit for bit. The result is read back and compared.

    Parameters and buffers get the names that load_state_dict expects. A plain DCP or a set is converted as a whole, unless
    --module selects a part. The whole checkpoint is held in memory.
    """
    from rackrun.checkpoint.offline.convert import Layout, layout_of
    from rackrun.checkpoint.offline.convert import convert as carry_out

    if to not in _LAYOUTS:
        raise UsageError(f"--to {to} is no layout.", remedy=f"give one of {', '.join(_LAYOUTS)}.")
    if everything and module is not None:
        raise UsageError("--all and --module cannot be given together.", remedy="give one of them.")
    source, target = absolute(source), absolute(target)
    if to != "rackrun" and is_remote(target):
        raise UsageError(f"{target} is in an object store.", remedy="write it to a local directory, and copy it there.")
    kind = layout_of(source)
    if kind == "rackrun" and checkpoint_number(source.name) is None:
        source = one_store(source, None).directory
    chosen = not everything and (module is not None or kind == "rackrun")
    done = carry_out(
        source,
        target,
        cast(Layout, to),
        names=(lambda held: model_names(held, module)) if chosen else None,
        file_bytes_max=int(file_gb * 1e9),
        unsafe_pickle=unsafe_pickle,
    )
    if as_json:
        print_json(
            {
                "path": str(target),
                "source": done.source,
                "target": done.target,
                "tensors": done.tensors,
                "bytes": done.bytes,
                "others": done.others,
            }
        )
        return
    others = f" and {done.others} other values" if done.others else ""
    print(f"{target}: {done.tensors} tensors{others}, {amount(done.bytes)}, read back and compared")
