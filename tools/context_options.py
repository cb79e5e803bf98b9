"""Options for conversations that outgrow the model's context."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npu.queue_options import QueueOptions

    from .answers import Answer

__all__ = ["add_context_options", "context_remarks", "queue_options"]


def add_context_options(group: argparse._ActionsContainer) -> None:
    """Add what happens at the end of the context, and what is seen of a long one."""
    group.add_argument(
        "--overflow",
        choices=("stop", "slide", "refuse"),
        metavar="HOW",
        help="at the context's end: stop (default), slide or refuse",
    )
    group.add_argument("--window", type=int, metavar="N", help="see the newest N tokens only, and the sinks")
    group.add_argument("--sinks", type=int, metavar="N", help="first tokens seen beside the window (default: 4)")


def queue_options(args: argparse.Namespace) -> QueueOptions:
    """What `add_context_options` asked for.

    Raises:
        UsageError: a number is out of range, or an option would have no effect.
    """
    from hostcache.errors import UsageError
    from hostcache.window import AttentionWindow
    from npu.overflow import USUAL_SINKS

    if args.sinks is not None and args.window is None:
        raise UsageError("--sinks are seen beside a window: give --window, too", sinks=args.sinks)
    if args.beams is not None and (args.overflow is not None or args.window is not None):
        raise UsageError(
            "a search by --beams sees everything and ends at the context: leave --overflow and --window out"
        )
    options: QueueOptions = {"overflow": args.overflow or "stop"}
    if args.window is not None:
        options["window"] = AttentionWindow(args.window, USUAL_SINKS if args.sinks is None else args.sinks)
    return options


def context_remarks(answers: Iterable[Answer], context_length: int) -> list[str]:
    """What to say of answers that the context ended, and how to go on, or that lost sight of what came before."""
    from hostcache.request import FinishReason

    answers = list(answers)
    remarks = []
    ended = sum(one.finish_reason is FinishReason.CONTEXT for one in answers)
    if ended:
        whose = "the answer" if ended == 1 else f"{ended} answers"
        remarks.append(f"the context of {context_length} tokens ended {whose}; --overflow slide goes on past it")
    unseen = max(one.unseen_tokens for one in answers)
    if unseen:
        remarks.append(f"at its end the answer saw nothing of {unseen} earlier tokens, which its window had passed")
    return remarks
