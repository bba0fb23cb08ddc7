"""The example model and its data."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

import vescale_compile as vc
from vescale_compile.examples.llama import SIZES, Llama, LlamaConfig, rotary_angles, rotate
from vescale_compile.examples.optimizers import RECIPES
from vescale_compile.examples.text import batches, read_text, standard_library

TINY = SIZES["tiny"]


def tokens_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def test_logits_have_one_score_for_each_token_of_the_vocabulary() -> None:
    assert Llama(TINY)(tokens_of(3, 7)).shape == (3, 7, TINY.vocab_size)


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model, tokens, labels = Llama(TINY), tokens_of(3, 7), tokens_of(3, 7).flip(1)
    expected = F.cross_entropy(model(tokens).transpose(1, 2), labels)
    torch.testing.assert_close(model(tokens, labels), expected)


def test_a_token_changes_no_earlier_logits() -> None:
    model, tokens = Llama(TINY), tokens_of(1, 9)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 20, 8)
    cos, sin = rotary_angles(20, 8, torch.device("cpu"))
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2)
    for distance in (0, 3, 11):
        diagonal = scores[0, 0].diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_grouped_heads_equal_full_heads_with_repeated_projections() -> None:
    grouped = Llama(TINY)
    full = Llama(replace(TINY, kv_heads=TINY.heads))
    repeats = TINY.heads // TINY.kv_heads
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith((".k.weight", ".v.weight"))]:
        heads = state[name].view(TINY.kv_heads, TINY.head_dim, TINY.dim)
        state[name] = heads.repeat_interleave(repeats, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens_of(2, 6)), full(tokens_of(2, 6)))


def test_initialization_after_the_meta_device_equals_initialization_in_place() -> None:
    direct = Llama(TINY)
    torch.manual_seed(3)
    direct.reset_parameters()
    with torch.device("meta"):
        late = Llama(TINY)
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), late.parameters(), strict=True))


def test_initialization_scales_residual_projections_by_depth() -> None:
    config = LlamaConfig(layers=8, dim=128, heads=4, kv_heads=4)
    layer = Llama(config).layers[0]
    ratio = layer.get_parameter("attention.q.weight").std() / layer.get_parameter("attention.out.weight").std()
    assert ratio.item() == pytest.approx((2 * config.layers) ** 0.5, rel=0.05)


def test_tied_embeddings_use_one_matrix_and_survive_the_meta_device() -> None:
    with torch.device("meta"):
        model = Llama(replace(TINY, tie_embeddings=True))
    model.to_empty(device="cpu")
    model.reset_parameters()
    untied = sum(parameter.numel() for parameter in Llama(TINY).parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == untied - TINY.vocab_size * TINY.dim
    model(tokens_of(1, 4), tokens_of(1, 4)).backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize(("name", "parameters"), [("30M", 30e6), ("125M", 125e6), ("1B", 1e9)])
def test_named_sizes_have_their_number_of_parameters(name: str, parameters: float) -> None:
    with torch.device("meta"):
        model = Llama(SIZES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden_dim": 0}, "hidden_dim is 0"),
        ({"dim": 36}, "even number of features"),
        ({"kv_heads": 3}, "not a multiple of kv_heads 3"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_text_is_every_byte_of_the_text_files(tmp_path: Path) -> None:
    (tmp_path / "nested").mkdir()
    (tmp_path / "a.txt").write_bytes(b"a" * 90)
    (tmp_path / "nested" / "b.txt").write_bytes(b"b" * 110)
    text = read_text(tmp_path)
    together = bytes(text.train.tolist()) + bytes(text.validation.tolist())
    assert sorted(together) == sorted(b"a" * 90 + b"b" * 110)
    assert len(text.validation) == 4


def test_text_leaves_out_binary_hidden_and_installed_files(tmp_path: Path) -> None:
    for folder in ("site-packages", ".git", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.py").write_bytes(b"x" * 100)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0" * 20)
    (tmp_path / ".secret").write_bytes(b"x" * 100)
    (tmp_path / "kept.py").write_bytes(b"y" * 100)
    text = read_text(tmp_path)
    assert set(text.train.tolist()) | set(text.validation.tolist()) == {ord("y")}


def test_text_keeps_a_folder_that_itself_lies_under_a_skipped_name(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a.py").write_bytes(b"y" * 100)
    assert len(read_text(folder).train) == 98


def test_text_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no text files"):
        read_text(tmp_path)


def test_the_standard_library_is_real_text() -> None:
    assert (standard_library() / "argparse.py").is_file()


def dealt_positions(rank: int, count: int, world_size: int = 3) -> list[tuple[int, ...]]:
    """First positions of the windows of `count` batches: the text is its own index."""
    data = torch.arange(250, dtype=torch.uint8)
    dealt = batches(data, batch=2, length=10, rank=rank, world_size=world_size, seed=5)
    return [tuple(tokens[:, 0].tolist()) for tokens, _ in islice(dealt, count)]


def test_a_batch_is_windows_of_the_text_and_the_bytes_after_each() -> None:
    data = torch.arange(250, dtype=torch.uint8)
    tokens, labels = next(batches(data, batch=2, length=10, rank=0, world_size=3, seed=5))
    assert tokens.shape == (2, 10)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(10))
    assert torch.equal(labels, tokens + 1)


def test_no_two_ranks_learn_the_same_byte_in_an_epoch() -> None:
    batches_of_an_epoch = 24 // (3 * 2)  # 24 whole windows, 3 ranks, 2 windows each
    starts = [start for rank in range(3) for pair in dealt_positions(rank, batches_of_an_epoch) for start in pair]
    learned = [start + offset for start in starts for offset in range(1, 11)]
    assert len(set(learned)) == len(learned) == 240


def test_the_same_seed_deals_the_same_batches_and_epochs_differ() -> None:
    assert dealt_positions(1, 12) == dealt_positions(1, 12)
    assert dealt_positions(1, 4) != dealt_positions(1, 8)[4:]


def test_text_too_short_for_a_batch_on_every_rank_is_refused_with_the_rank() -> None:
    data = torch.zeros(69, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"rank 2: the text has 69 bytes.* needs 70"):
        batches(data, batch=2, length=10, rank=2, world_size=3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2)
def test_a_sharded_model_learns_with_each_optimizer(name: str) -> None:
    recipe = RECIPES[name]
    model = vc.fully_shard(Llama(TINY), granularity=recipe.granularity())
    optimizer = recipe.build(model, recipe.lr)
    tokens, losses = tokens_of(4, 17), []
    for _ in range(10):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        with torch.compiler.set_stance("force_eager"):  # what optimizers compile has tests of its own, in tests/optim
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
