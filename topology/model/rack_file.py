"""Read rack files: YAML descriptions of racks that are simulated, or that no driver describes.

See examples/racks/. ::

    format: 1
    trays: {count: 18, gpus: 4, numa: [0, 0, 1, 1]}       # the default for every rack
    racks:
      - serial: "1825024170029"
        fabric: [leaf-0, spine-0]
        nvlink: {domain: 5f4e0c3a-..., clique: 32766}     # all its trays; or `tray`: each tray alone; or cliques: [...]

Racks that name the same domain and clique are joined by NVLink, for example the two racks of an NVL36x2.

What the file does not state is generated, the same at every reading: names, and GPU UUIDs derived from the rack's
serial. Every error names the file, the line and the field.
"""

from __future__ import annotations

import difflib
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeVar

import yaml

from rackrun.topology.model.errors import RackFileError, TopologyError
from rackrun.topology.model.racks import Clique, CliqueId, Gpu, Rack, Topology, Tray

__all__ = ["RACKS_MAX", "made_up_uuid", "read_rack_file"]

T = TypeVar("T")
FORMAT = 1
RACKS_MAX, TRAYS_MAX, GPUS_MAX = 10_000, 1_000, 64
_MADE_UP = uuid.UUID("6f9619ff-8b86-d011-b42d-00c04fc964ff")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def read_rack_file(path: Path) -> Topology:
    """Read a rack file. Raises `RackFileError`."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise RackFileError(
            f"{path} cannot be read: {error}.", remedy="give a rack file; see examples/racks."
        ) from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        line = f":{mark.line + 1}" if mark else ""
        raise RackFileError(f"{path}{line}: no YAML: {problem}.", remedy="mend the file there.") from error
    if root is None:
        raise RackFileError(f"{path} is empty.", remedy="give a rack file; see examples/racks.")
    return _Reader(str(path)).topology(root)


def made_up_uuid(rack: str, tray: int, gpu: int) -> str:
    """Return the UUID of a GPU for which the file gives none. No driver lists it."""
    return f"GPU-{uuid.uuid5(_MADE_UP, f'{rack}/{tray}/{gpu}')}"


class _Fields:
    """A mapping in the file, whose fields are read one by one. An unknown field is an error."""

    def __init__(self, reader: _Reader, node: yaml.Node, what: str, known: str) -> None:
        self.reader, self.node, self.what = reader, node, what
        if not isinstance(node, yaml.MappingNode):
            reader.refuse(node, f"{what} is {_shown(node)}", f"write it as a mapping of: {known}")
        names = known.split()
        self._found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                remedy = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(names)}"
                reader.refuse(key, f"{what} has no field {name!r}", remedy)
            if name in self._found:
                reader.refuse(key, f"{name!r} is there twice in {what}", "keep one")
            self._found[name] = value

    def take(self, name: str, read: Callable[[yaml.Node, str], T], default: T) -> T:
        """Return a field as ``read`` reads it, or ``default`` when the field is missing."""
        node = self._found.get(name)
        return default if node is None else read(node, f"{name!r} of {self.what}")

    def must(self, name: str, read: Callable[[yaml.Node, str], T]) -> T:
        """Return a field as ``read`` reads it. Raises `RackFileError` when the field is missing."""
        node = self._found.get(name)
        if node is None:
            self.reader.refuse(self.node, f"{self.what} has no {name!r}", f"add {name}")
        return read(node, f"{name!r} of {self.what}")

    def __contains__(self, name: str) -> bool:
        return name in self._found


class _Reader:
    def __init__(self, file: str) -> None:
        self._file = file
        self._said: dict[str, int] = {}
        """Every word of the file -> the last line it is on, to find the line of an error in the whole."""

    def refuse(self, node: yaml.Node, what: str, remedy: str) -> NoReturn:
        raise RackFileError(f"{self._file}:{node.start_mark.line + 1}: {what}.", remedy=f"{remedy}.")

    # -- the file
    def topology(self, root: yaml.Node) -> Topology:
        """Read the whole file. Raises `RackFileError`."""
        fields = _Fields(self, root, "the file", "format name trays racks")
        if fields.must("format", self._number) != FORMAT:
            self.refuse(root, f"it is not of format {FORMAT}", f"write it as format {FORMAT}, or use a newer release")
        fields.take("name", self._text, "")
        defaults = fields.take("trays", lambda node, what: self._trays(node, what, None), _Trays())
        nodes = fields.must("racks", self._list)
        if not nodes or len(nodes) > RACKS_MAX:
            self.refuse(root, f"{len(nodes)} racks", f"describe 1 to {RACKS_MAX}")
        racks, cliques = [], []
        for number, node in enumerate(nodes):
            rack, joined = self._rack(node, number, len(nodes), defaults)
            racks.append(rack)
            cliques += joined
        try:
            return Topology.of(racks, _joined(cliques))
        except TopologyError as error:
            line = self._line_of(error.what) or nodes[0].start_mark.line + 1
            raise RackFileError(f"{self._file}:{line}: {error.what}", remedy=error.remedy) from error

    def _line_of(self, what: str) -> int:
        """Return the last line with a value that ``what`` names; 0 when there is none."""
        words = set(re.split(r"[\s,:;()']+", what))
        return max((line for value, line in self._said.items() if value in words), default=0)

    def _rack(self, node: yaml.Node, number: int, count: int, defaults: _Trays) -> tuple[Rack, list[Clique]]:
        fields = _Fields(self, node, f"rack {number}", "serial name trays fabric nvlink")
        serial = fields.take("serial", self._text, f"rack-{number}")
        prefix = fields.take("name", self._text, f"rack-{number:02}" if count > 1 else "")
        described = fields.take("trays", lambda at, what: self._trays(at, what, defaults), defaults)
        if not described.count:
            self.refuse(node, f"rack {number} has no trays", "say how many: trays: 18")
        trays = tuple(described.tray(serial, prefix, index) for index in range(described.count))
        rack = Rack(serial=serial, trays=trays, fabric=tuple(fields.take("fabric", self._texts, [])))
        return rack, fields.take("nvlink", lambda at, what: self._nvlink(at, what, rack), [])

    def _trays(self, node: yaml.Node, what: str, defaults: _Trays | None) -> _Trays:
        found = replace(defaults) if defaults else _Trays()
        if isinstance(node, yaml.SequenceNode):
            found.named = [self._tray(at, f"tray {index}") for index, at in enumerate(node.value)]
            found.count = len(found.named)
            if not 1 <= found.count <= TRAYS_MAX:
                self.refuse(node, f"{found.count} trays", f"describe 1 to {TRAYS_MAX} in a rack")
            return found
        if isinstance(node, yaml.ScalarNode):
            found.count = self._bounded(node, what, 1, TRAYS_MAX)
            return found
        fields = _Fields(self, node, what, "count gpus numa cpus nics slots")
        found.count = fields.take("count", lambda at, of: self._bounded(at, of, 1, TRAYS_MAX), found.count)
        found.gpus = fields.take("gpus", lambda at, of: self._bounded(at, of, 1, GPUS_MAX), found.gpus)
        found.numa = fields.take("numa", self._numbers, found.numa)
        found.cpus = fields.take("cpus", self._texts, found.cpus)
        found.nics = fields.take("nics", self._texts, found.nics)
        for name, given in (("numa", len(found.numa)), ("cpus", len(found.cpus)), ("nics", len(found.nics))):
            if given not in (0, found.gpus):
                self.refuse(node, f"{name!r} has {given} entries for {found.gpus} GPUs", "give one for each GPU")
        found.slots = fields.take("slots", self._numbers, found.slots)
        if found.slots and len(found.slots) != found.count:
            self.refuse(node, f"{len(found.slots)} slots for {found.count} trays", "give one for each tray")
        return found

    def _tray(self, node: yaml.Node, what: str) -> _Named:
        fields = _Fields(self, node, what, "name host serial slot gpus")
        return _Named(
            name=fields.take("name", self._name, ""),
            host=fields.take("host", self._text, ""),
            serial=fields.take("serial", self._text, ""),
            slot=fields.take("slot", self._number, None),
            gpus=fields.take("gpus", self._gpus, None),
        )

    def _gpus(self, node: yaml.Node, what: str) -> list[Gpu] | int | None:
        if isinstance(node, yaml.ScalarNode):
            return self._bounded(node, what, 1, GPUS_MAX)
        found = []
        for index, at in enumerate(self._list(node, what)):
            fields = _Fields(self, at, f"GPU {index} in {what}", "uuid index module_id bdf serial numa cpus nics")
            found.append(
                Gpu(
                    uuid=fields.must("uuid", self._text),
                    index=fields.take("index", self._number, index),
                    module_id=fields.take("module_id", self._number, None),
                    bdf=fields.take("bdf", self._text, ""),
                    serial=fields.take("serial", self._text, ""),
                    numa=fields.take("numa", self._number, None),
                    cpus=fields.take("cpus", self._text, ""),
                    nics=tuple(fields.take("nics", self._texts, [])),
                )
            )
        if not 1 <= len(found) <= GPUS_MAX:
            self.refuse(node, f"{len(found)} GPUs", f"describe 1 to {GPUS_MAX} on a tray")
        return found

    # -- NVLink
    def _nvlink(self, node: yaml.Node, what: str, rack: Rack) -> list[Clique]:
        if isinstance(node, yaml.ScalarNode):
            if node.value != "tray":
                self.refuse(node, f"{what} is {node.value!r}", "write `tray`, or a mapping with domain and clique")
            return []  # a GPU that is in no clique is joined with those of its own tray
        fields = _Fields(self, node, what, "domain clique cliques")
        domain = fields.must("domain", self._text)
        if "cliques" not in fields:
            members = tuple(gpu.uuid for tray in rack.trays for gpu in tray.gpus)
            return [Clique(id=CliqueId(domain, fields.must("clique", self._number)), gpus=members)]
        if "clique" in fields:
            self.refuse(node, f"{what} has both 'clique' and 'cliques'", "keep one")
        found = []
        for at in fields.must("cliques", self._list):
            of = _Fields(self, at, f"a clique in {what}", "id trays")
            members = tuple(
                gpu.uuid for index in of.must("trays", self._ranges(len(rack.trays))) for gpu in rack.trays[index].gpus
            )
            found.append(Clique(id=CliqueId(domain, of.must("id", self._number)), gpus=members))
        return found

    def _ranges(self, trays: int) -> Callable[[yaml.Node, str], list[int]]:
        def read(node: yaml.Node, what: str) -> list[int]:
            found: list[int] = []
            for text in self._texts(node, what) if isinstance(node, yaml.SequenceNode) else [self._text(node, what)]:
                match = _RANGE.fullmatch(text)
                first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
                if not first <= last < trays:
                    self.refuse(node, f"{what} is {text!r}", f"give trays from 0 to {trays - 1}, as 3 or 0-8")
                found += range(first, last + 1)
            return found

        return read

    # -- values
    def _list(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.refuse(node, f"{what} is {_shown(node)}", "write a list")
        return list(node.value)

    def _text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not str(node.value).strip():
            self.refuse(node, f"{what} is {_shown(node)}", "write a word")
        self._said[str(node.value)] = node.start_mark.line + 1
        return str(node.value)

    def _name(self, node: yaml.Node, what: str) -> str:
        name = self._text(node, what)
        if "/" in name or not name.isprintable() or " " in name:
            self.refuse(node, f"{what} is {name!r}", "use letters, digits, dots and hyphens")
        return name

    def _texts(self, node: yaml.Node, what: str) -> list[str]:
        return [self._text(at, what) for at in self._list(node, what)]

    def _number(self, node: yaml.Node, what: str) -> int:
        value = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
        if not re.fullmatch(r"\d{1,10}", value, re.ASCII):
            self.refuse(node, f"{what} is {_shown(node)}", "write a whole number")
        return int(value)

    def _numbers(self, node: yaml.Node, what: str) -> list[int]:
        return [self._number(at, what) for at in self._list(node, what)]

    def _bounded(self, node: yaml.Node, what: str, least: int, most: int) -> int:
        number = self._number(node, what)
        if not least <= number <= most:
            self.refuse(node, f"{what} is {number}", f"give {least} to {most}")
        return number


@dataclass(frozen=True)
class _Named:
    """A tray that the file describes individually."""

    name: str = ""
    host: str = ""
    serial: str = ""
    slot: int | None = None
    gpus: list[Gpu] | int | None = None


@dataclass
class _Trays:
    """What the trays of a rack have in common."""

    count: int = 0
    gpus: int = 1
    numa: list[int] = field(default_factory=list)
    cpus: list[str] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    named: list[_Named] = field(default_factory=list)

    def tray(self, rack: str, prefix: str, index: int) -> Tray:
        """Return a tray of the rack, with generated values where the file states none."""
        own = self.named[index] if self.named else _Named()
        made_up = f"{prefix}-tray-{index:02}" if prefix else f"tray-{index:02}"
        gpus = own.gpus
        if not isinstance(gpus, list):
            gpus = [self._gpu(made_up_uuid(rack, index, at), at) for at in range(gpus or self.gpus)]
        return Tray(
            name=own.name or made_up,
            index=index,
            gpus=tuple(gpus),
            host=own.host,
            slot=own.slot if own.slot is not None or not self.slots else self.slots[index],
            serial=own.serial,
        )

    def _gpu(self, name: str, index: int) -> Gpu:
        return Gpu(
            uuid=name,
            index=index,
            module_id=index + 1,
            numa=self.numa[index] if index < len(self.numa) else None,
            cpus=self.cpus[index] if index < len(self.cpus) else "",
            nics=tuple(self.nics[index : index + 1]),
        )


def _joined(cliques: list[Clique]) -> list[Clique]:
    """Merge cliques that several racks name: an NVLink domain may span racks (NVL36x2 is two racks of one domain)."""
    members: dict[CliqueId, list[str]] = {}
    for clique in cliques:
        members.setdefault(clique.id, []).extend(clique.gpus)
    return [Clique(id=name, gpus=tuple(gpus)) for name, gpus in members.items()]


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(str(node.value)[:60])
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
