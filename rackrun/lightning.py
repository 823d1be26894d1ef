"""``Trainer(strategy=rackrun.lightning.Elastic())``: Lightning's training loop on ranks that may be replaced; and
``Fabric(strategy=rackrun.lightning.ElasticFabric(run))`` for loops under `rackrun.elastic`. See docs/lightning.md."""

from rackrun.frameworks.lightning.elastic_strategy import Elastic
from rackrun.frameworks.lightning.fabric_strategy import ElasticFabric

__all__ = ["Elastic", "ElasticFabric"]
