"""For scripts under `rackrun.elastic` that use Hugging Face Accelerate. See docs/accelerate.md."""

from rackrun.frameworks.accelerate.accelerate_ranks import follow_ranks

__all__ = ["follow_ranks"]
