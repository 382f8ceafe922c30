"""Loading rank by rank: equal to loading whole and sharding, without reading other ranks' experts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ranks import run_ranks, values
from tbo.errors import CheckpointError
from tbo.models import checkpoint_files
from tbo.models.checkpoint import load_expert_parallel
from tbo.models.expert_parallel import is_sharded, shard_experts, shard_of
from tbo.models.expert_shard import expert_modules
from tiny_models import FAMILIES, build

pytestmark = pytest.mark.timeout(120)

CANON = ("deepseek_v3", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe")
FORMATS: dict[str, dict[str, Any]] = {
    "each expert apart, in many files": {"max_shard_size": "100KB"},
    "experts stacked, in one file": {"save_original_format": False},
}
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of saved tiny models, each written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def directory(family: str, form: str = "experts stacked, in one file") -> Path:
        path = root / f"{family} {list(FORMATS).index(form)}"
        if not path.exists():
            build(family).save_pretrained(path, **FORMATS[form])
        return path

    return directory


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, also those no state dict holds."""
    return {
        name: tensor
        for kind in (model.named_parameters, model.named_buffers)
        for name, tensor in kind(remove_duplicate=False)
    }


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    mine, other = state_of(actual), state_of(expected)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype, name
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, equal_nan=True, msg=name)


def reference(path: Path, *, rank: int, world_size: int, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    shard_experts(model, rank=rank, world_size=world_size)
    return model


# Equal to loading whole and sharding


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", CANON)
def test_a_rank_holds_what_sharding_the_whole_model_leaves_it(
    saved: Callable[..., Path], family: str, form: str, world_size: int
) -> None:
    rank = world_size // 2
    model = load_expert_parallel(saved(family, form), rank=rank % world_size, world_size=world_size)
    assert_same(model, reference(saved(family, form), rank=rank % world_size, world_size=world_size))
    assert is_sharded(model) == (world_size > 1)
    assert not model.training


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CANON])
def test_the_other_families(saved: Callable[..., Path], family: str) -> None:
    form = "each expert apart, in many files"
    model = load_expert_parallel(saved(family, form), rank=1, world_size=2)
    assert_same(model, reference(saved(family, form), rank=1, world_size=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "deepseek_v4"])
def test_weights_take_the_type_asked_for_and_some_stay_float32(
    saved: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    model = load_expert_parallel(saved(family), rank=0, world_size=4, dtype=dtype)
    assert_same(model, reference(saved(family), rank=0, world_size=4, dtype=dtype))
    kinds = {tensor.dtype for tensor in model.parameters()} | {tensor.dtype for tensor in model.buffers()}
    assert dtype in kinds


def test_the_checkpoints_own_type_is_the_default(tmp_path: Path) -> None:
    build("mixtral", dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_expert_parallel(tmp_path, rank=0, world_size=2).dtype == torch.bfloat16


def test_one_rank_computes_what_the_whole_model_computes(saved: Callable[..., Path]) -> None:
    model = load_expert_parallel(saved("deepseek_v3"), rank=0, world_size=1)
    expected: Any = build("deepseek_v3")  # weights from_pretrained leaves in the mapped file round differently
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=0, atol=0)
    torch.testing.assert_close(
        model.generate(IDS, max_new_tokens=3, do_sample=False),
        expected.generate(IDS, max_new_tokens=3, do_sample=False),
    )


def test_a_model_loaded_whole_is_saved_as_it_was(saved: Callable[..., Path], tmp_path: Path) -> None:
    form = "each expert apart, in many files"
    load_expert_parallel(saved("mixtral", form), rank=0, world_size=1).save_pretrained(tmp_path, **FORMATS[form])
    for path in saved("mixtral", form).glob("*.safetensors*"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def _load_and_save(source: str, target: str) -> tuple[int, int]:
    model = load_expert_parallel(source, dist.group.WORLD)
    model.save_pretrained(target, max_shard_size="100KB")
    shard = shard_of(model)
    assert shard is not None
    return shard.first, shard.count


def test_ranks_load_their_parts_and_save_the_whole(saved: Callable[..., Path], tmp_path: Path) -> None:
    source = saved("deepseek_v3", "each expert apart, in many files")
    assert values(run_ranks(2, _load_and_save, str(source), str(tmp_path / "out"))) == [(0, 4), (4, 4)]
    for path in source.glob("*.safetensors*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_generation_settings_come_along(tmp_path: Path) -> None:
    path = tmp_path
    build("mixtral").save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, "eos_token_id": 2}))
    assert load_expert_parallel(path, rank=0, world_size=2).generation_config.max_new_tokens == 7


def test_attention_implementation(saved: Callable[..., Path]) -> None:
    model = load_expert_parallel(saved("mixtral"), rank=0, world_size=2, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


# Tied weights


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    build("qwen3_moe", tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_expert_parallel(tmp_path, rank=0, world_size=2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, reference(tmp_path, rank=0, world_size=2))


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_stored_twice(tmp_path: Path, equal: bool) -> None:
    build("qwen3_moe", tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone() + (0 if equal else 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_expert_parallel(tmp_path, rank=0, world_size=2)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal
    assert_same(model, reference(tmp_path, rank=0, world_size=2))


def test_a_tied_model_without_either_copy_is_refused(tmp_path: Path) -> None:
    build("qwen3_moe", tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"2 missing: model\.embed_tokens\.weight, lm_head\.weight|2 missing: lm"):
        load_expert_parallel(tmp_path, rank=0, world_size=2)


# What is read


class _Watched:
    """safe_open, noting every tensor that is looked at and every part that is read."""

    read: list[tuple[str, Any]]
    files: list[str]

    def __init__(self, path: Path, **options: Any) -> None:
        type(self).files.append(Path(path).name)
        self._handle: Any = safe_open(path, **options)

    def keys(self) -> Any:
        return self._handle.keys()

    def get_tensor(self, key: str) -> Any:
        self.read.append((key, None))
        return self._handle.get_tensor(key)

    def get_slice(self, key: str) -> _Slice:
        return _Slice(key, self._handle.get_slice(key), self.read)

    def __exit__(self, *arguments: object) -> None:
        self._handle.__exit__(*arguments)


class _Slice:
    def __init__(self, key: str, piece: Any, read: list[tuple[str, Any]]) -> None:
        self._key, self._piece, self._read = key, piece, read
        read.append((key, "header"))

    def get_shape(self) -> Any:
        return self._piece.get_shape()

    def __getitem__(self, part: Any) -> Any:
        self._read.append((self._key, part))
        return self._piece[part]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[_Watched]:
    class Fresh(_Watched):
        read, files = [], []

    monkeypatch.setattr(checkpoint_files, "safe_open", Fresh)
    return Fresh


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gpt_oss"])
def test_other_ranks_experts_are_never_read(
    saved: Callable[..., Path], watched: type[_Watched], family: str, form: str
) -> None:
    model = load_expert_parallel(saved(family, form), rank=1, world_size=4)
    assert watched.read
    for key, part in watched.read:
        one = re.search(r"\.experts\.(\d+)\.", key)
        if one is not None:
            assert int(one.group(1)) in (2, 3), key
        elif ".experts." in key:
            assert part == "header" or part == slice(2, 4), (key, part)
    stored = build(family).state_dict()
    kept = {name: tensor for name, tensor in state_of(model).items() if name in stored}
    assert model.tbo_loaded.bytes_read == sum(tensor.nbytes for tensor in kept.values())
    assert model.tbo_loaded.tensors_read == len([part for _, part in watched.read if part != "header"])
    apart = any(re.search(r"\.experts\.\d+\.", key) for key, _ in watched.read)
    layers = len(expert_modules(model))
    assert model.tbo_loaded.foreign_tensors == (layers * 3 * 6 if apart else 0)


def test_progress_is_told_after_every_tensor(saved: Callable[..., Path]) -> None:
    told: list[tuple[int, int, str]] = []
    model = load_expert_parallel(saved("olmoe"), rank=0, world_size=2, progress=lambda *report: told.append(report))
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total, _ in told} == {len(told)}
    assert {name for _, _, name in told} == set(build("olmoe").state_dict())
    assert model.tbo_loaded.seconds > 0


def test_a_progress_bar_is_drawn(saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    load_expert_parallel(saved("olmoe"), rank=0, world_size=2, progress=True)
    assert "Loading weights" in capsys.readouterr().out
