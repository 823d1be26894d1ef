"""``rackctl ckpt convert``: writes a checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from rackrun.checkpoint.base.location import absolute, is_remote
from rackrun.checkpoint.durable.durable_manifest import generation_of
from rackrun.checkpoint.offline.directory_survey import one_store
from rackrun.ctl.ckpt.ckpt_render import amount, print_json
from rackrun.ctl.ckpt.export_names import model_names
from rackrun.errors import UsageError

__all__ = ["convert"]

_LAYOUTS = ("rackrun", "dcp", "hf")


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A job's directory or a generation; a plain DCP; a safetensors set."),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new directory; with --to rackrun a job's.")],
    to: Annotated[
        str, typer.Option("--to", metavar="LAYOUT", help="rackrun, dcp (torch's own) or hf (Hugging Face's).")
    ],
    everything: Annotated[bool, typer.Option("--all", help="All tensors, under the names they have.")] = False,
    module: Annotated[
        str | None, typer.Option("--module", metavar="NAME", help="Which module: its name, or that of a part of it.")
    ] = None,
    file_gb: Annotated[float, typer.Option("--file-gb", min=0.001, help="Size of the files of a set, at most.")] = 5.0,
    unsafe_pickle: Annotated[
        bool, typer.Option("--unsafe-pickle", help="Read pickles: whoever wrote them can run any code.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """From one layout to another, bit for bit; what was written is read again and compared. All of it is in memory meanwhile.

    Parameters and buffers are named as load_state_dict takes them. What a plain DCP or a set has is all taken, unless --module chooses.
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
    if kind == "rackrun" and generation_of(source.name) is None:
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
