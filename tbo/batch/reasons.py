"""Why a step was, or was not, overlapped: every code there is, with its text."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """One code a cause. The numbers travel in votes, so they never change meaning; gaps leave room.

    10 to 29 are objections: one rank's is enough to keep all ranks from overlapping. 30 to 49 say why a rank does not
    ask for overlap by itself though it would join in. 50 and up are only known once all votes are in.
    """

    NONE = 0

    POLICY_NEVER = 10
    DISABLED = 11
    OUTPUTS_CAPTURED = 12
    LAYER_HOOKS = 13
    TRAINING = 14
    CACHE_NOT_SPLITTABLE = 15
    ARGUMENT_NOT_SPLITTABLE = 16
    OVER_A_LIMIT = 17
    CANNOT_SPLIT = 18

    TOO_FEW_TOKENS = 30
    DECODE_OFF = 31
    NOTHING_TO_SPLIT = 32
    PREFIX_READ = 33
    NOTHING_TO_HIDE = 34
    IDLE = 35

    ONE_SUB_BATCH = 50
    ALL_IDLE = 51
    ALL_LEFT = 52

    @property
    def text(self) -> str:
        """The reason as a clause for a person."""
        return _TEXTS[self]


_TEXTS = {
    Reason.NONE: "nothing stands against overlapping",
    Reason.POLICY_NEVER: "overlap='never' was asked for",
    Reason.DISABLED: "TBO_DISABLE=1 is set",
    Reason.OUTPUTS_CAPTURED: "hidden states, router logits or attentions are captured layer by layer in this call",
    Reason.LAYER_HOOKS: "a layer has hooks, which fire only when layers run one after the other",
    Reason.TRAINING: "gradients or gradient checkpointing are on",
    Reason.CACHE_NOT_SPLITTABLE: "this kind of cache cannot be cut into sub-batches",
    Reason.ARGUMENT_NOT_SPLITTABLE: "a layer received an argument that cannot be cut into sub-batches",
    Reason.OVER_A_LIMIT: "a sub-batch would be larger than the dispatcher takes",
    Reason.CANNOT_SPLIT: "the batch must not be split",
    Reason.TOO_FEW_TOKENS: "its smallest sub-batch has too few tokens: splitting would cost more than it hides",
    Reason.DECODE_OFF: "overlap of decode and verify steps is off by default",
    Reason.NOTHING_TO_SPLIT: "all tokens fall into one sub-batch",
    Reason.PREFIX_READ: "a sequence reads prefix blocks that another one writes in this step, so they stay together",
    Reason.NOTHING_TO_HIDE: "there is no communication to hide on one rank",
    Reason.IDLE: "the rank has no tokens",
    Reason.ONE_SUB_BATCH: "only one sub-batch is configured",
    Reason.ALL_IDLE: "no rank has tokens",
    Reason.ALL_LEFT: "every rank's generation is over",
}
