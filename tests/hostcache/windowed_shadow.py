"""The shadow with windows: some requests have one, or all have the model's, and some go on behind the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hostcache.window import AttentionWindow
from tests.hostcache.shadow import Fault, ShadowEngine

__all__ = ["WindowedShadow"]


@dataclass
class WindowedShadow(ShadowEngine):
    """Traffic in which tokens see little, beside traffic in which they see all."""

    def further_limits(self) -> dict[str, Any]:
        size = self.block_tokens
        return {
            "context_length": self.random.choice((5, 7, 2 * self.blocks)) * size + self.random.randint(0, size),
            "model_window": self.random.choice((0, 0, 1, size, 2 * size + 1)),
        }

    def further_terms(self) -> dict[str, Any]:
        size, of_model = self.block_tokens, self.scheduler.config.model_window > 0
        terms: dict[str, Any] = {"max_tokens": self.random.randint(1, 8 * size)}
        if not of_model and self.random.random() < 0.7:
            window = AttentionWindow(self.random.randint(1, 3 * size), self.random.choice((0, 0, 1, size, size + 1)))
            terms["window"] = window
        if of_model or "window" in terms:
            terms["slide"] = self.random.random() < 0.7
        return terms

    def check(self) -> None:
        """That windows keep tables short, besides."""
        for request in self.scheduler.running:
            view, config = self.view(request), self.scheduler.config
            if view.window is None:
                continue
            chunk = min(config.prefill_chunk, config.max_rows)
            most = view.front + view.window + chunk + 2 * self.block_tokens
            if request.table.held > most:
                raise Fault(f"request {request.id} holds {request.table.held} tokens, more than {most}")
            gap = request.table.gap
            if gap.tokens != view.gap(request.computed):
                raise Fault(f"request {request.id} let go of {gap} by {request.computed} tokens, as {view}")
            self.seen["let go"] += gap.tokens > 0
            self.seen["let go behind sinks"] += gap.tokens > 0 and gap.front > 0
            self.seen["slid twice"] += view.slides and gap.turned > view.context
            self.seen["outgrew the pool"] += request.length > self.blocks * self.block_tokens
        super().check()
