"""What the compiler and the runtime need of PyTorch's private parts. Tried on torch 2.11.0 to 2.13.0.

- :mod:`.groups`           process groups, and collectives that the public functions lack
- :mod:`.autograd`         what autograd is about to do, and what is to be done when it has
- :mod:`.tracing`          graphs and their shapes, and what traces them
- :mod:`.aot`              AOTAutograd: the joint graph, its halves, and how they run
- :mod:`.inductor`         Inductor, as a compiler with options and caches
- :mod:`.inductor_graphs`  what Inductor does to graphs, and has code for
- :mod:`.inductor_order`   an order of nodes that it keeps
- :mod:`.inductor_reads`   what its kernels may read, and when
- :mod:`.checkpoint`       how torch.distributed.checkpoint checks a plan
- :mod:`.pieces`           what is asked for piece by piece, and added up

``ragged/dtensor.py`` names those that a subclass of DTensor needs, ``warm_start.py`` those of AOTAutograd's cache. Each
entry says why no public name does. When a PyTorch release breaks something, it breaks here.
"""
