"""`tbo.wrap`: puts a Hugging Face mixture-of-experts model under the scheduler."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from torch import nn

from tbo.batch import Overlap, Phase, Thresholds
from tbo.core import Instrument, Progress
from tbo.errors import PeerError, RanksDisagreeError, UnsupportedModelError, UserError, WrapError
from tbo.models.expert_parallel import is_sharded, shard_experts, shard_of, total_experts
from tbo.models.layer import EXPERT_PARALLEL_CHANNEL, HuggingFaceLayer
from tbo.models.orders import Schedule, check_schedules, default_schedules
from tbo.models.parts import Decoder, find_decoder
from tbo.models.residuals import HyperConnections
from tbo.ops.dispatch import create_dispatchers
from tbo.ops.link import Link
from tbo.ops.peers import Peers
from tbo.ops.rendezvous import decline
from tbo.wrapping import guards
from tbo.wrapping.batching import Batching
from tbo.wrapping.handle import HANDLE_ATTRIBUTE, Handle
from tbo.wrapping.hook import LayerHook
from tbo.wrapping.leaving import Leaving
from tbo.wrapping.options import DISABLE_VARIABLE, check_options, disabled, world_size_of
from tbo.wrapping.plans import OrderName, PlanBook
from tbo.wrapping.self_check import self_check
from tbo.wrapping.step import StepRunner
from tbo.wrapping.voting import Voting

if TYPE_CHECKING:
    import torch.distributed as dist

DEFAULT_TIMEOUT = 600.0
"""Seconds a rank may be silent. Minutes, because kernels compiled at first use take that long."""

_NO_FACTS = ("_name_or_path", "name_or_path")
"""Where a model was loaded from, which may differ from rank to rank."""


def wrap(  # noqa: PLR0913 - the fixed public signature
    model: nn.Module,
    ep_group: dist.ProcessGroup | None = None,
    dispatcher: str = "auto",
    sub_batches: int = 2,
    overlap: Overlap = "auto",
    link: Link | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    instruments: Sequence[Instrument] = (),
    *,
    schedules: Mapping[Phase, Schedule] | None = None,
    order: OrderName = "interleaved",
    thresholds: Thresholds | None = None,
) -> Handle:
    """Wraps a model in place: ``model(...)`` and ``model.generate(...)`` work as before, with the same numbers.

    Args:
        model: a transformers mixture-of-experts model (>= 5.17), loaded whole, or by `tbo.load_expert_parallel`.
        ep_group: the ranks that share the experts; each calls `wrap`, which shards them if need be. None: one rank.
        dispatcher: how tokens travel; "auto" is "local" on one rank and "all_to_all" on several.
        sub_batches: into how many parts an overlapped step is cut.
        overlap: "auto" (documented thresholds decide, see `Thresholds`), "always" or "never".
        link: a modelled link that delays every transfer; for demonstrations and tests.
        timeout: seconds of silence after which a rank that waits gives up and names who never came. A recorded failure
            stops every rank in seconds, whatever this is.
        instruments: observers of every run.
        schedules: other orders of ops for some phases.
        order: "sequential" runs one sub-batch after another through the same plan: nothing overlaps, same numbers.
        thresholds: other thresholds for "auto".

    Returns:
        A handle: `last` (what the last step did), `finish`, `unwrap`.

    Raises:
        WrapError, UnsupportedModelError, DispatcherError, PlanError: a mistake, by name, with what to do.
        RanksDisagreeError, PeerError: ranks wrap different models or options; another rank failed while wrapping.
    """
    with _telling_the_group(ep_group):
        check_options(
            model,
            sub_batches=sub_batches,
            overlap=overlap,
            order=order,
            link=link,
            timeout=timeout,
            instruments=instruments,
            thresholds=thresholds,
        )
        options = _Options(
            dispatcher=dispatcher,
            sub_batches=sub_batches,
            overlap=overlap,
            link=link,
            timeout=timeout,
            instruments=tuple(instruments),
            schedules=check_schedules({} if schedules is None else schedules),
            order=order,
            thresholds=thresholds or Thresholds(),
        )
    return _wrap(model, ep_group, options)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """What `wrap` was called with, checked."""

    dispatcher: str
    sub_batches: int
    overlap: Overlap
    link: Link | None
    timeout: float
    instruments: tuple[Instrument, ...]
    schedules: Mapping[Phase, Schedule]
    order: OrderName
    thresholds: Thresholds
    disabled: bool = False


@contextlib.contextmanager
def _telling_the_group(ep_group: dist.ProcessGroup | None) -> Iterator[None]:
    """A mistake of this rank alone, found before ranks have met, must not leave the others waiting for it."""
    world_size = world_size_of(ep_group)
    try:
        yield
    except UserError as error:
        if world_size > 1:
            decline(ep_group, error)
        raise


def _wrap(model: nn.Module, ep_group: dist.ProcessGroup | None, options: _Options) -> Handle:
    progress = Progress()
    if ep_group is None or world_size_of(ep_group) == 1:
        return _assemble(model, None, None, progress, options)
    # First of all, so that a rank that finds something wrong with its model can tell the others.
    device = next((parameter.device for parameter in model.parameters()), None)
    peers = Peers(ep_group, sub_batches=options.sub_batches, timeout=options.timeout, progress=progress, device=device)
    try:
        handle = _assemble(model, ep_group, peers, progress, options)
    except BaseException as error:
        if not isinstance(error, PeerError | RanksDisagreeError):
            peers.fail(error)
        peers.close("its model could not be wrapped")
        raise
    return handle


def _assemble(
    model: nn.Module,
    ep_group: dist.ProcessGroup | None,
    peers: Peers | None,
    progress: Progress,
    options: _Options,
) -> Handle:
    if HANDLE_ATTRIBUTE in vars(model):
        raise WrapError("this model is already wrapped", remedy="Call unwrap() on its handle first.")
    if peers is not None:
        peers.compare(_facts(model, options))
    decoder = find_decoder(model)
    sharded = is_sharded(model)
    _check_group_fits(model, peers)
    if disabled():
        if not sharded:
            notes = (f"{DISABLE_VARIABLE}=1: tbo is off, the model runs its own code",)
            return Handle(model, None, leaving=None, peers=peers, notes=notes)
        options = replace(options, disabled=True)
    layers = _layers_as_ops(model, decoder)
    num_experts = total_experts(next(layer for layer in layers if layer.is_sparse).adapter.moe.experts)
    found = [self_check(decoder, layers, num_experts=num_experts, sharded=sharded)]
    # Before the experts are cut: options that do not fit must leave the model whole.
    runner = _runner(decoder, layers, num_experts, peers, progress, options)
    if peers is not None and not sharded:
        freed = shard_experts(model, ep_group)
        found.append(f"sharded the experts over {peers.world_size} ranks, {freed / 2**20:.1f} MiB freed on this one")
    leaving = None if peers is None else Leaving(model, runner, peers)
    return Handle(model, runner, leaving=leaving, peers=peers, notes=(*found, *runner.notes))


def _runner(
    decoder: Decoder,
    layers: Sequence[HuggingFaceLayer],
    num_experts: int,
    peers: Peers | None,
    progress: Progress,
    options: _Options,
) -> StepRunner:
    dispatchers = create_dispatchers(
        options.dispatcher,
        num_experts=num_experts,
        sub_batches=options.sub_batches,
        peers=peers,
        link=options.link,
    )
    in_flight = dispatchers[0].limits.in_flight
    has_shared = any(layer.has_shared for layer in layers)
    plans = PlanBook(
        layers,
        {**default_schedules(has_shared_experts=has_shared), **options.schedules},
        sub_batches=options.sub_batches,
        order=options.order,
        limits={} if in_flight is None else {EXPERT_PARALLEL_CHANNEL: in_flight},
    )
    runner = StepRunner(
        decoder=decoder,
        layers=layers,
        plans=plans,
        batching=_batching(decoder, layers, plans, options.sub_batches),
        voting=Voting(
            sub_batches=options.sub_batches,
            overlap=options.overlap,
            thresholds=options.thresholds,
            disabled=options.disabled,
            fingerprint=plans.fingerprint,
            peers=peers,
            max_tokens=dispatchers[0].limits.max_tokens,
        ),
        dispatchers=dispatchers,
        peers=peers,
        instruments=options.instruments,
        progress=progress,
    )
    runner.hooks = tuple(LayerHook(runner, index, layer.layer) for index, layer in enumerate(layers))
    return runner


def _layers_as_ops(model: nn.Module, decoder: Decoder) -> list[HuggingFaceLayer]:
    layers = [HuggingFaceLayer(layer, decoder.config) for layer in decoder.layers]
    if not any(layer.is_sparse for layer in layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a mixture-of-experts model: none of its {len(layers)} layers has a router"
            " and experts",
            remedy="Wrap a mixture-of-experts model; a dense one has no expert communication to hide.",
        )
    guards.refuse_offloading(layers)
    guards.refuse_foreign_forwards(layers)
    guards.refuse_mixed_devices(layers)
    guards.refuse_silent_hooks(layers)
    return layers


def _check_group_fits(model: nn.Module, peers: Peers | None) -> None:
    shard = shard_of(model)
    if shard is None:
        return
    rank, world_size = (0, 1) if peers is None else (peers.rank, peers.world_size)
    ranks, rank_of_shard = shard.total // shard.count, shard.first // shard.count
    if (rank_of_shard, ranks) != (rank, world_size):
        raise WrapError(
            f"the model holds the experts of rank {rank_of_shard} of {ranks}, but this is rank {rank} of {world_size}",
            remedy="Pass the group the experts were sharded over.",
        )


def _batching(decoder: Decoder, layers: Sequence[HuggingFaceLayer], plans: PlanBook, sub_batches: int) -> Batching:
    return Batching(
        layers,
        first_sparse=plans.first_sparse,
        sub_batches=sub_batches,
        config=decoder.config,
        like=next(layers[0].layer.parameters()),
        hidden_tail=_hidden_tail(decoder, layers[plans.first_sparse]),
    )


def _hidden_tail(decoder: Decoder, layer: HuggingFaceLayer) -> tuple[int, ...]:
    """Shape of one token's hidden states: with hyper-connections, several streams of them."""
    hidden_size = int(decoder.config.hidden_size)
    if isinstance(layer.adapter.traits.residual, HyperConnections):
        return (int(decoder.config.hc_mult), hidden_size)
    return (hidden_size,)


def _facts(model: nn.Module, options: _Options) -> dict[str, str]:
    """What every rank must agree on, as text."""
    names = ("dispatcher", "sub_batches", "order")
    facts = {name: str(getattr(options, name)) for name in names}
    facts[DISABLE_VARIABLE] = str(disabled())
    facts["the model"] = type(model).__name__
    facts["experts already sharded"] = str(is_sharded(model))
    for package in ("torch", "transformers", "two-batch-overlap"):
        try:
            facts[f"{package} version"] = version(package)
        except PackageNotFoundError:
            facts[f"{package} version"] = "not installed as a package"
    config: Any = getattr(model, "config", None)
    described = config.to_dict() if config is not None else {}
    for name, value in described.items():
        if name not in _NO_FACTS:
            facts[f"config.{name}"] = json.dumps(value, sort_keys=True, default=str)
    facts["dtype"] = str(next((parameter.dtype for parameter in model.parameters()), None))
    return facts
