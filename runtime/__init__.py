"""What runs at each step: shard buffers, collectives, and the boundary between parameters and graphs.

From parameters to collectives:

- :mod:`.marker`        the call that module code makes for a parameter, and that the compiler replaces
- :mod:`.eager`         what that call does where nothing was compiled
- :mod:`.boundary`      sharded parameters in, flat graph inputs out; flat gradients in, sharded gradients out
- :mod:`.backwards`     what a backward does at its end, once for all regions in it
- :mod:`.unshard`       all-gather and unpack, with pack and reduce-scatter as its backward
- :mod:`.ops`           the operators that stand for a unit's communication in a graph; :mod:`.quantized_ops` for
  quantized communication, :mod:`.crossing` for what a forward gathers for its backward, :mod:`.leaving` for reductions
  that outlast it
- :mod:`.collectives`   collectives as they are launched and waited for; :mod:`.messages`, what they are made of over
  gloo; :mod:`.groups`, the process groups by name; :mod:`.streams`, where a GPU's streams meet

What there is of a unit, and of all:

- :mod:`.dbuffer`       one unit's buffers over a device mesh, and what a rank knows about them
- :mod:`.reductions`    gradients that accumulate, and :mod:`.rounding`, how those that are quantized are rounded
- :mod:`.packing`       what travels of a quantized unit; :mod:`.quantizing`, its kernels, of which
  :mod:`.strips` are compiled, :mod:`.block_arithmetic` what all compute, and :mod:`.block_places` where
- :mod:`.model`         what a model takes of a rank's memory beside one of its graphs
- :mod:`.pool`          static memory for communication, shared by compiled graphs; :mod:`.registered`, if the network
  is to know it
- :mod:`.arrivals`      reduced gradients on their way to whoever first reads them
- :mod:`.courses`       layers compiled one by one: what a graph launches for the next; :mod:`.writes`, whether that
  was written to meanwhile

Among ranks:

- :mod:`.agreement`     proof that all ranks are about to do the same collectives
- :mod:`.decisions`     what the first of them decides for all
- :mod:`.life`          what they have in common as long as a process group lives
- :mod:`.used`          parameters that not every rank uses
"""
