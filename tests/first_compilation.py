"""Imported by the server that ranks are forked from: what a first compilation sets up, they inherit.

Inductor looks for the processor's vector instructions and traces hundreds of patterns, PyTorch fills caches of shapes:
seconds, in each rank of each file.
"""

import gc

import torch
import torch._inductor.config
import torch.hub
from ranks import fake_world

import vescale_compile as vc
from vescale_compile.examples.llama import Llama, LlamaConfig


def compile_two() -> None:
    """A language model, and with generated code what has few kernels: a C++ compiler takes a second for each."""
    model = vc.fully_shard(Llama(LlamaConfig(vocab_size=16, dim=16, layers=1, heads=2, kv_heads=1)))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    torch.compile(model, backend="vescale", options={"lowering": "eager"})(tokens, tokens).backward()
    torch.compile(vc.fully_shard(torch.nn.Linear(16, 16)), backend="vescale")(torch.ones(4, 16)).sum().backward()


# Threads and pools of compilers would not survive the fork; nor would autograd's threads, which a build with CUDA
# starts even where there is no GPU.
if not torch.backends.cuda.is_built():
    torch.hub.tqdm.monitor_interval = 0  # Inductor draws a progress bar, which starts a thread
    with fake_world(2), torch._inductor.config.patch(compile_threads=1):
        compile_two()
torch._dynamo.reset()
gc.collect()
gc.freeze()  # what all ranks inherit: half a million objects, that no collection in a rank has to visit again
