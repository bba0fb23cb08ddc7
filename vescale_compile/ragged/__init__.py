"""RaggedShard tensors: the placement, the tensor, and what every operation on it does.

- :mod:`.placement`    ``RaggedShard``: who holds which run of elements
- :mod:`.dtensor`      ``RaggedDTensor``: a DTensor around this rank's run
- :mod:`.arriving`     a gradient that is still on its way
- :mod:`.dispatch`     which operators work on shards, and the error for those that don't
- :mod:`.local`        what handlers share: layouts, slices, the error that refuses
- :mod:`.lists`        lists of tensors: foreach and fused optimizer steps
- :mod:`.reductions`   norms and full reductions, over the mesh
- :mod:`.redistribute` between ragged layouts, Replicate, Shard and Partial
- :mod:`.checkpoint`   what torch.distributed.checkpoint asks of a tensor
- :mod:`.save_planner` a plan of what ranks save that thousands of them can afford
"""
