"""Experts spread over ranks: what each keeps, what is refused, and that no part is ever taken for the whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ranks import run_ranks, values
from tbo.errors import CheckpointError, UnsupportedModelError, WrapError
from tbo.models.expert_parallel import gather_state_dict, is_sharded, shard_experts, shard_of, total_experts
from tbo.models.expert_shard import expert_modules, expert_tensors
from tiny_models import FAMILIES, NUM_EXPERTS, build

pytestmark = pytest.mark.timeout(120)

IDS = torch.tensor([[5, 6, 7, 8]])


def experts_of(model: nn.Module) -> nn.Module:
    """The experts of the first sparse layer."""
    return expert_modules(model)[0][1]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, also those no state dict holds."""
    return {
        name: tensor.detach().clone()
        for kind in (model.named_parameters, model.named_buffers)
        for name, tensor in kind(remove_duplicate=False)
    }


# What a rank keeps


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_keeps_its_consecutive_experts_and_everything_else(family: str, world_size: int) -> None:
    whole = build(family)
    before = state_of(whole)
    names = {f"{name}.{key}" for name, module in expert_modules(whole) for key, _ in expert_tensors(module)}
    share = NUM_EXPERTS // world_size
    for rank in (0, world_size - 1):
        model = copy.deepcopy(whole)
        kept = slice(rank * share, (rank + 1) * share)
        freed = shard_experts(model, rank=rank, world_size=world_size)
        for name, tensor in state_of(model).items():
            expected = before[name][kept] if name in names else before[name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True, msg=name)
        assert freed == sum(before[name].nbytes for name in names) * (world_size - 1) // world_size
        for _, module in expert_modules(model):
            assert module.num_experts == share
            assert total_experts(module) == NUM_EXPERTS


def test_parameters_stay_the_same_objects_and_hold_no_more_memory_than_they_need() -> None:
    model = build("gpt_oss")
    experts = experts_of(model)
    before = dict(experts.named_parameters())
    for parameter in experts.parameters():
        parameter.requires_grad_(False)
    shard_experts(model, rank=1, world_size=4)
    for name, parameter in experts.named_parameters():
        assert parameter is before[name]
        assert not parameter.requires_grad
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    record = shard_of(model)
    assert record is not None
    assert (record.first, record.count, record.total, record.rank, record.ranks) == (2, 2, 8, 1, 4)


def test_gradients_are_cut_with_their_parameters() -> None:
    model = build("mixtral")
    parameter = next(experts_of(model).parameters())
    parameter.grad = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    expected = parameter.grad[4:6].clone()
    shard_experts(model, rank=2, world_size=4)
    torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)


def test_buffers_of_experts_are_cut_too() -> None:
    model = build("mixtral")
    for _, experts in expert_modules(model):
        experts.register_buffer("scale", torch.arange(8.0))
    shard_experts(model, rank=1, world_size=2)
    assert dict(experts_of(model).named_buffers())["scale"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_one_rank_changes_nothing() -> None:
    model: Any = build("qwen3_moe")
    expected = model(IDS).logits
    assert shard_experts(model, rank=0, world_size=1) == 0
    assert not is_sharded(model)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=0)
    model.state_dict()


# A part is never taken for the whole


@pytest.fixture
def sharded() -> Any:
    model = build("deepseek_v3")
    shard_experts(model, rank=1, world_size=4)
    return model


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_plain_forward_raises(family: str, implementation: str) -> None:
    model = build(family)
    model.config._experts_implementation = implementation
    shard_experts(model, rank=1, world_size=4)
    with pytest.raises(WrapError, match=r"experts holds experts 2 to 3 of 8: .* Call tbo\.wrap\(model, ep_group="):
        model(IDS)


@pytest.mark.parametrize("part", ["", "model", "model.layers.2", "model.layers.2.mlp.experts"])
def test_state_dicts_are_refused_wherever_they_are_taken(sharded: Any, part: str) -> None:
    with pytest.raises(CheckpointError, match=r"holds 2 of 8 experts: its state dict would be a checkpoint"):
        sharded.get_submodule(part).state_dict()
    sharded.model.layers[0].state_dict()  # dense: whole on every rank


def test_saving_without_a_group_is_refused(sharded: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="spread without a process group, so they cannot be gathered"):
        sharded.save_pretrained(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_guards(sharded: Any, copied: Callable[[Any], Any], tmp_path: Path) -> None:
    other = copied(sharded)
    assert is_sharded(other)
    with pytest.raises(WrapError, match="holds experts 2 to 3 of 8"):
        other(IDS)
    with pytest.raises(CheckpointError, match="2 of 8 experts"):
        other.state_dict()
    with pytest.raises(CheckpointError, match="without a process group"):
        other.save_pretrained(tmp_path)
    assert vars(other)["save_pretrained"]._model is other


def test_a_whole_state_dict_does_not_load_into_a_part(sharded: Any) -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        sharded.load_state_dict(build("deepseek_v3").state_dict(), strict=False)


# What is refused


def refused(model: nn.Module, error: type[Exception], match: str, **arguments: Any) -> None:
    """Sharding raises, and leaves the model as it was."""
    before = {name: tensor.shape for name, tensor in model.named_parameters()}
    with pytest.raises(error, match=match):
        shard_experts(model, **({"rank": 0, "world_size": 2} | arguments))
    assert {name: tensor.shape for name, tensor in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"world_size": 3},
            r"the 8 experts of model\.layers\.0\.mlp\.experts cannot be shared equally by 3 ranks. .*1, 2, 4, 8",
        ),
        ({"world_size": 16}, "has 8 experts, fewer than the 16 ranks"),
        ({"rank": 2}, "rank 2 of 2 ranks does not exist"),
        ({"rank": -1}, "rank -1 of 2 ranks does not exist"),
        ({"world_size": 0}, "rank 0 of 0 ranks does not exist"),
        ({"world_size": None}, "neither an expert-parallel group nor a rank and world size"),
        ({"rank": None, "world_size": None}, "neither an expert-parallel group"),
        ({"ep_group": object()}, "given together with a rank or world size"),
        ({"ep_group": object(), "rank": None, "world_size": None}, "torch.distributed is not initialised"),
    ],
)
def test_shares_and_groups_that_make_no_sense(arguments: dict[str, Any], match: str) -> None:
    refused(build("mixtral"), WrapError, match, **arguments)


def test_models_without_experts() -> None:
    refused(nn.Linear(2, 2), UnsupportedModelError, "Linear has no decoder")
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    refused(AutoModelForCausalLM.from_config(config), UnsupportedModelError, "no mixture-of-experts layer")


def test_a_model_sharded_twice(sharded: Any) -> None:
    refused(sharded, WrapError, r"model\.layers\.1\.mlp\.experts is sharded already: it holds experts 2 to 3 of 8")


def test_experts_without_values() -> None:
    config = build("mixtral").config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    refused(model, WrapError, r"model\.layers\.0\.mlp\.experts\.gate_up_proj is on the meta device")


def test_tied_experts() -> None:
    model = build("mixtral")
    model.model.layers[3].mlp.experts.down_proj = model.model.layers[1].mlp.experts.down_proj
    refused(model, WrapError, r"layers\.1\.mlp\.experts\.down_proj shares its memory with model\.layers\.3\.mlp")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_experts(dtype: torch.dtype) -> None:
    model = build("mixtral")
    experts = model.model.layers[2].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.data.to(dtype), requires_grad=False)
    refused(model, UnsupportedModelError, r"layers\.2\.mlp\.experts\.down_proj is a Tensor of torch\.\w+: quantised")


class _Packed(nn.Parameter):
    """Stands for a quantisation library's parameter class."""


def test_parameters_of_other_libraries() -> None:
    model = build("mixtral")
    experts = model.model.layers[2].mlp.experts
    experts.down_proj = _Packed(experts.down_proj.data)
    refused(model, UnsupportedModelError, r"down_proj is a _Packed of torch\.float32")


def test_tensors_that_are_not_stacked_by_expert() -> None:
    model = build("mixtral")
    model.model.layers[2].mlp.experts.register_buffer("table", torch.zeros(5))
    refused(model, UnsupportedModelError, r"table has shape \[5\]: dimension 0 is not the 8 experts")


def test_adapted_and_hooked_experts() -> None:
    model = build("mixtral")
    model.model.layers[2].mlp.experts.lora = nn.Linear(2, 2)
    refused(model, UnsupportedModelError, r"layers\.2\.mlp\.experts holds lora\.weight")
    model = build("mixtral")
    experts = model.model.layers[2].mlp.experts
    experts.forward = experts.forward
    refused(model, WrapError, r"layers\.2\.mlp\.experts carries a forward of its own")


def test_a_model_sharded_halfway_is_named() -> None:
    model = build("mixtral")
    shard_experts(model, rank=0, world_size=2)
    whole = build("mixtral").model.layers[1]
    model.model.layers[1] = whole
    with pytest.raises(WrapError, match=r"only some layers .*: model\.layers\.1\.mlp\.experts still holds all"):
        is_sharded(model)


# Across ranks


def _gather(family: str) -> list[bool]:
    rank = dist.get_rank()
    model, whole = build(family, dtype=torch.bfloat16), build(family, dtype=torch.bfloat16).state_dict()
    shard_experts(model, dist.group.WORLD)
    everywhere = gather_state_dict(model, dist.group.WORLD)
    on_last = gather_state_dict(model, dist.group.WORLD, destination=dist.get_world_size() - 1)
    equal = list(everywhere) == list(whole) and all(torch.equal(everywhere[name], whole[name]) for name in whole)
    with pytest.raises(CheckpointError):
        model.state_dict()  # gathering has not left the guard open
    return [equal, len(on_last) == (len(whole) if rank == dist.get_world_size() - 1 else 0)]


@pytest.mark.parametrize(("family", "world_size"), [("deepseek_v3", 2), ("gpt_oss", 2), ("llama4_text", 4)])
def test_gathering_gives_the_whole_state_dict(family: str, world_size: int) -> None:
    assert values(run_ranks(world_size, _gather, family)) == [[True, True]] * world_size


def _gather_in_pieces() -> bool:
    three_of_four_experts = 3 * 64 * 64 * 2 + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tbo.models.expert_saving._CHUNK_BYTES", three_of_four_experts)
        return _gather("mixtral")[0]


def test_gathering_some_experts_at_a_time_gives_the_same() -> None:
    assert values(run_ranks(2, _gather_in_pieces)) == [True, True]


def _save(directory: str) -> None:
    model = build("qwen3_moe")
    shard_experts(model, dist.group.WORLD)
    model.save_pretrained(f"{directory}/own")
    model.save_pretrained(f"{directory}/parts", max_shard_size="100KB", save_original_format=False)
    assert Path(directory, "own", "config.json").exists()  # on every rank: all return when the files are written


def test_saving_on_every_rank_writes_the_checkpoint_of_the_whole_model(tmp_path: Path) -> None:
    values(run_ranks(2, _save, str(tmp_path / "ranks")))
    whole = build("qwen3_moe")
    whole.save_pretrained(tmp_path / "whole" / "own")
    whole.save_pretrained(tmp_path / "whole" / "parts", max_shard_size="100KB", save_original_format=False)
    for kind in ("own", "parts"):
        written = sorted(path.name for path in (tmp_path / "ranks" / kind).iterdir())
        assert written == sorted(path.name for path in (tmp_path / "whole" / kind).iterdir())
        for name in written:
            assert (tmp_path / "ranks" / kind / name).read_bytes() == (tmp_path / "whole" / kind / name).read_bytes()


def _save_where_it_fails(directory: str) -> str:
    model = build("mixtral")
    shard_experts(model, dist.group.WORLD)
    with pytest.raises(CheckpointError) as caught:
        model.save_pretrained(directory)
    return str(caught.value)


def test_a_checkpoint_that_cannot_be_written_is_known_to_every_rank(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    first, second = values(run_ranks(2, _save_where_it_fails, str(blocked / "checkpoint")))
    assert "the checkpoint could not be written: NotADirectoryError" in first
    assert "the first rank of the group could not write the checkpoint" in second


def _wrong_groups() -> list[str]:
    said: list[str] = []

    def note(action: Callable[[], object]) -> None:
        with pytest.raises((WrapError, CheckpointError)) as caught:
            action()
        said.append(str(caught.value))

    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    other = pairs[1 - rank // 2]
    model = build("mixtral")
    note(lambda: shard_experts(model, other))
    note(lambda: shard_experts(model, "ranks"))
    shard_experts(model, pairs[rank // 2])
    note(lambda: gather_state_dict(model, dist.group.WORLD))
    return said


def test_groups_that_are_not_the_right_one() -> None:
    for rank, said in enumerate(values(run_ranks(4, _wrong_groups))):
        assert said[0].startswith("this process is not a member of the expert-parallel group")
        assert said[1].startswith("ep_group is a str, not a process group")
        assert f"this rank holds the share of rank {rank % 2} of 2, but is rank {rank} of 4" in said[2]
