"""For configurations of torchtitan: ``rackrun.titan.Trainer.Config(...)`` in place of ``Trainer.Config(...)``, and
``class T(rackrun.titan.Elastic, Trainer)`` for a Trainer of your own. See docs/torchtitan.md."""

from rackrun.frameworks.titan.elastic_trainer import Elastic, Trainer

__all__ = ["Elastic", "Trainer"]
