"""Which parameters are hidden matrices, for a matrix optimizer, and which are not, for AdamW."""

from __future__ import annotations

import itertools

from torch import Tensor

_EMBEDDINGS = {"emb", "wpe", "wte"}
_OUTSIDE_LAYERS = frozenset(
    {"classifier", "cls", "head", "heads", "logits", "out", "output", "proj_out", "qa_outputs", "score", "shared"}
)


def is_hidden_matrix(name: str | None, param: Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of matrices, between a model's embeddings and its heads.

    Its shape must be [m, n], or [experts, m, n] for a stack, with m and n of at least 2. Its name, a qualified one
    whose parts are separated by dots, must not say otherwise:

    - an embedding has a part that contains ``embed``, ends in ``_emb``, or is ``emb``, ``wte`` or ``wpe``, or, before
      any number, a part that is ``shared`` (between encoder, decoder and head, as in T5 and BART);
    - a head has a part that ends in ``_head``, or, before any number, a part that is ``classifier``, ``cls``,
      ``head``, ``heads``, ``logits``, ``out``, ``output``, ``proj_out``, ``qa_outputs`` or ``score`` (numbers are
      those of layers: ``layers.3.attention.out`` is no head);
    - a bias, which is a matrix in a stack of experts, has a part that is ``bias`` or ends in ``_bias``;
    - of a stack, a part contains ``conv``: those are kernels.

    Without a name the shape decides.
    """
    parts = name.split(".") if name is not None else []
    before_layers = itertools.takewhile(lambda part: not part.isdigit(), parts)
    return may_be_hidden_matrix(name, param) and _OUTSIDE_LAYERS.isdisjoint(before_layers)


def may_be_hidden_matrix(name: str | None, param: Tensor) -> bool:
    """:func:`is_hidden_matrix` of what may be part of a layer: ``name`` may be that in the layer alone, which is what
    ``fully_shard`` of a layer sees."""
    if param.ndim not in (2, 3) or min(param.shape[-2:]) < 2:
        return False
    parts = name.split(".") if name is not None else []
    embedding = any("embed" in part or part.endswith("_emb") or part in _EMBEDDINGS for part in parts)
    head = any(part.endswith("_head") for part in parts)
    bias = any(part == "bias" or part.endswith("_bias") for part in parts)
    kernel = param.ndim == 3 and any("conv" in part for part in parts)
    return not (embedding or head or bias or kernel)
