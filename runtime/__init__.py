"""What runs at each step: shard buffers, collectives, and the boundary between parameters and graphs.

- :mod:`.ops`        the operators that stand for a unit's communication in a graph
- :mod:`.dbuffer`    one unit's buffers over a device mesh, and what a rank knows about them
- :mod:`.unshard`    all-gather and unpack, with pack and reduce-scatter as its backward
- :mod:`.boundary`   sharded parameters in, flat graph inputs out; flat gradients in, sharded gradients out
- :mod:`.marker`     the call that module code makes for a parameter, and that the compiler replaces
- :mod:`.eager`      what that call does where nothing was compiled
- :mod:`.pool`       static memory for communication, shared by compiled graphs
- :mod:`.registered` memory for communication that the network knows
- :mod:`.agreement`  proof that all ranks are about to do the same collectives
"""
