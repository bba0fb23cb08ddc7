"""What a trained byte-level model does on text it has not seen: its loss, and a continuation.

Both run the model on one window of a fixed shape [1, length], so that they share one compiled graph. With
sharded parameters each forward is collective: all ranks make the same calls.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vescale_compile.examples.text import Batch


@torch.no_grad()
def mean_loss(
    logits_of: Callable[[Tensor], Tensor], data: Iterator[Batch], *, windows: int, device: torch.device
) -> float:
    """Mean cross-entropy in nats per byte over `windows` batches of each rank, of one window each."""
    total = torch.zeros((), device=device)
    for tokens, labels in islice(data, windows):
        logits = logits_of(tokens.to(device)).float()
        total += F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten())
    dist.all_reduce(total)
    return total.item() / (windows * dist.get_world_size())


@torch.no_grad()
def continuation(
    logits_of: Callable[[Tensor], Tensor],
    prompt: bytes,
    *,
    count: int,
    length: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> bytes:
    """`count` bytes that follow `prompt`, drawn at `temperature`; 0 always takes the likeliest byte.

    The model sees at most the last `length` bytes. A shorter context stands at the start of the window: the
    zeros behind it cannot be seen by a causal model.
    """
    generator = torch.Generator().manual_seed(seed)
    written = bytearray(prompt)
    window = torch.zeros(1, length, dtype=torch.int64)
    for _ in range(count):
        context = written[-length:]
        window[0, : len(context)] = torch.frombuffer(context, dtype=torch.uint8)
        scores = logits_of(window.to(device))[0, len(context) - 1].float().cpu()
        if temperature == 0:
            written.append(int(scores.argmax()))
        else:
            odds = torch.softmax(scores / temperature, dim=0)
            written.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(written[len(prompt) :])
