"""The cost model: time of computation and of collectives on a described cluster, from shapes alone.

Everything here is arithmetic on its arguments, so that all ranks decide alike. What reads graphs (:mod:`.compute`,
:mod:`.flops`) or measures (:mod:`.calibrate` and its kin, :mod:`.operators`) needs PyTorch: import it by name.
"""

from vescale_compile.cost.calibration import Calibration
from vescale_compile.cost.cluster import PRESETS, Cluster, Link, MeasuredCollective, gpu_cluster, wire_cluster
from vescale_compile.cost.collectives import KINDS, CollectiveCost, averaged_over_replicas, collective_cost
from vescale_compile.cost.devices import DEVICES, Device, device
from vescale_compile.cost.optimizer import OPTIMIZERS, OptimizerCost

__all__ = [
    "DEVICES",
    "KINDS",
    "OPTIMIZERS",
    "PRESETS",
    "Calibration",
    "Cluster",
    "CollectiveCost",
    "Device",
    "Link",
    "MeasuredCollective",
    "OptimizerCost",
    "averaged_over_replicas",
    "collective_cost",
    "device",
    "gpu_cluster",
    "wire_cluster",
]
