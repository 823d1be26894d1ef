"""The Python of README.md and docs/ as whole scripts: each block with what it leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "blocks", "whole"]

_OPENS, _CLOSES = "```python", "```"

_BEFORE = {
    "convert_a_script.md: import rackrun, torch": """
        from typing import Any
        from torch import Tensor, nn
        from torch.utils.data import TensorDataset
        class GPT(nn.Module):
            def __init__(self, config: dict[str, int]) -> None: ...
        config: dict[str, int] = {}
        dataset = TensorDataset()
        def loss_of(model: nn.Module, batch: Any) -> Tensor: ...
        def evaluate() -> None: ...
        """,
    "api.md: @run.step": """
        from typing import cast
        import rackrun
        import torch
        run = cast(rackrun.Run, None)
        data: list[torch.Tensor] = []
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor: ...
        """,
    'api.md: writer = run.main_only(lambda: SummaryWriter("runs"))': """
        from typing import cast
        import types
        import rackrun
        run = cast(rackrun.Run, None)
        framework = types.ModuleType("framework")
        class SummaryWriter:
            def __init__(self, folder: str) -> None: ...
        """,
    "api.md: for number in run.steps(1000, phases=True):": """
        from typing import cast
        import rackrun
        run = cast(rackrun.Run, None)
        @run.step
        def train_step(step: rackrun.Step) -> float: ...
        def evaluate() -> float: ...
        """,
    "api.md: while run.goes_on(": """
        from typing import cast
        import rackrun
        run = cast(rackrun.Run, None)
        class Progress:
            reward = 0.0
        progress = Progress()
        def collect_rollouts() -> None: ...
        def update_policy(step: rackrun.Step) -> float: ...
        def update_critic(step: rackrun.Step) -> float: ...
        """,
    "loggers.md: bar = tqdm(": """
        from typing import Any, cast
        import rackrun
        run = cast(rackrun.Run, None)
        tqdm: Any = None
        @run.step
        def train_step(step: rackrun.Step) -> float: ...
        """,
    "streams.md: data = run.stream(": """
        from typing import Any, cast
        import rackrun
        import torch
        run = cast(rackrun.Run, None)
        dataset: Any = None
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor: ...
        """,
    "streams.md: rows = datasets": """
        from typing import Any, cast
        import rackrun
        run = cast(rackrun.Run, None)
        datasets: Any = None
        files: list[str] = []
        def collate(samples: Any) -> Any: ...
        """,
    "streams.md: def make(shard: int, shards: int) -> StatefulDataLoader": """
        from typing import Any, cast
        import rackrun
        from torch.utils.data import DataLoader, IterableDataset
        run = cast(rackrun.Run, None)
        class StatefulDataLoader(DataLoader[Any]): ...
        class Part(IterableDataset[Any]):
            def __init__(self, shard: int, shards: int) -> None: ...
            def __iter__(self) -> Any: ...
        """,
    "streams.md: def make(shard: int, shards: int) -> Any": """
        from typing import Any, cast
        import rackrun
        run = cast(rackrun.Run, None)
        class WebDataset:
            def __init__(self, *arguments: Any, **options: Any) -> None: ...
            def decode(self) -> Any: ...
        urls: list[str] = []
        def collate(samples: Any) -> Any: ...
        """,
    "streams.md: def make_for_this_rank": """
        from typing import Any, cast
        import rackrun
        run = cast(rackrun.Run, None)
        framework: Any = None
        """,
    "huggingface.md: from rackrun.hf import": "",
    "recipes.md: from rackrun.hf import": "",
    "recipes.md: run.track(model=model, average=average": """
        from typing import cast
        import rackrun
        import torch
        run = cast(rackrun.Run, None)
        model = average = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        """,
    "recipes.md: for _ in range(4):": """
        from typing import cast
        import rackrun
        run = cast(rackrun.Run, None)
        def play() -> None: ...
        def update(step: rackrun.Step) -> float: ...
        """,
    "get_started.md: import os": "",
    "test_your_script.md: def test_the_trainer_survives": """
        from rackrun.chaos.testing import Chaos
        """,
    "accelerate.md: import rackrun": """
        from typing import Any
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset
        dataset = TensorDataset()
        def build_model() -> nn.Module: ...
        def loss_of(model: nn.Module, batch: Any) -> torch.Tensor: ...
        """,
    "lightning.md: from lightning import Trainer": "",
    "fabric.md: import rackrun": """
        from typing import Any
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset
        dataset = TensorDataset()
        def build_model() -> nn.Module: ...
        def loss_of(model: nn.Module, batch: Any) -> torch.Tensor: ...
        """,
    "megatron.md: import rackrun": """
        from typing import Any
        from torch.utils.data import TensorDataset
        dataset = TensorDataset()
        def build_model() -> Any: ...
        def build_optimizer(model: Any) -> tuple[Any, Any]: ...
        def forward_step(iterator: Any, model: Any) -> Any: ...
        """,
    "torchtitan.md: from rackrun.titan import Trainer": "",
    'exact_reduction.md: @rackrun.elastic(global_batch_size=512, micro_batch_size=8, reduction="exact")': "import rackrun",
    "scale_lr.md: @rackrun.elastic(global_batch_size=512, micro_batch_size=8, batch=rackrun.ScaleLR": "import rackrun",
    "test_your_script.md: from rackrun.chaos import": "",
    "checkpoint.md: import torch": "",
    "checkpoint_cli.md: import json": """
        import torch
        model = torch.nn.Linear(1, 1)
        """,
    'gpu_kit.md: @check("B12"': "from benchmarks.gpu.registry import Context, Found, check",
    "write_a_policy.md: from rackrun.policy import": "",
    "providers.md: from rackrun.provider import": "",
    "topology.md: rack = FakeRack.create": """
        from pathlib import Path
        from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack, build
        from rackrun.topology.gpu_driver.nvml_watch import NvmlWatch
        from rackrun.topology.model.rack_file import read_rack_file
        folder = Path()
        """,
    "topology.md: board = PlacementArrays": """
        from pathlib import Path
        from rackrun.topology.model.mesh import Mesh
        from rackrun.topology.model.rack_file import read_rack_file
        from rackrun.topology.placement.arrays import PlacementArrays
        from rackrun.topology.placement.objective import Fitness
        from rackrun.topology.placement.rank_assignment import place
        """,
}
"""Page and how the block begins -> what stands before it. A block that is not named here fails the test: say what makes it whole."""

_AFTER = {
    "@rackrun.elastic(": "def main(run: rackrun.Run) -> None: ...",
    "from rackrun.provider import": "from rackrun.provider import Provider\nprovider: Provider = Shelf()",
}
"""How a block begins -> what stands behind it."""


class Block(NamedTuple):
    page: Path
    line: int
    """Of its first line of Python, from 1."""
    text: str

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of ``page`` that are marked as Python."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.strip() == _OPENS:
            end = lines.index(_CLOSES, number)
            yield Block(page, number + 2, "\n".join(lines[number + 1 : end]) + "\n")


def whole(block: Block) -> str | None:
    """It with what it leaves out; None where `_BEFORE` does not name it."""
    mine = f"{block.page.name}: {block.first}"
    before = next((text for start, text in _BEFORE.items() if mine.startswith(start)), None)
    if before is None:
        return None
    after = next((text for start, text in _AFTER.items() if block.first.startswith(start)), "")
    return re.sub(r"^ {8}", "", before, flags=re.MULTILINE) + "\n" + block.text + after + "\n"
