"""Hand prefixes that this engine computed to other engines, and take theirs, through host memory that all of them map.

The pages of a prefix are copied to shared host memory (`export`), where another engine copies them into its prefix
cache (`import_pages`); then they are released. So a request's prompt may be computed by one engine, and found cached by
the one that decodes."""

from __future__ import annotations

from collections import deque
from typing import cast

from quire.core.engine import Engine
from quire.core.request import Request
from quire.core.runner import SharingRunner
from quire.errors import InputError
from quire.ipc.messages import MAX_SHARED_PAGES, EngineMessage, HandOver, ImportPages, Reply
from quire.memory.paged import PagedMemory
from quire.memory.swap import Swap
from quire.protocol.sequence import Sequence
from quire.protocol.shared_host import SharedPage


class PageHandover:
    """The exports and imports of `engine`, on its thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._exports: dict[tuple[int, int], list[SharedPage]] = {}  # by client and number of the request
        # Messages to clients, in order, each with the number of the step whose page operations it waits for, or 0
        self._waiting: deque[tuple[int, int, EngineMessage]] = deque()

    @property
    def _swap(self) -> Swap | None:
        """The swap of a memory that shares host memory."""
        memory = self.engine.scheduler.memory
        is_shared = isinstance(memory, PagedMemory) and memory.swap.shared_host is not None
        return cast(PagedMemory, memory).swap if is_shared else None

    def export(self, client_index: int, number: int, request: Request, is_computed: bool) -> None:
        """Hand over the prompt of a request that has ended."""
        pages = list[SharedPage]()
        if self._swap is not None and is_computed:
            [seq] = request.finished_seqs
            prompt = Sequence(0, seq.tokens[: seq.prompt_len], cache_salt=seq.cache_salt)
            pages = self._swap.export_prefix(prompt)
            if len(pages) > MAX_SHARED_PAGES:
                self._swap.release_exported(pages)
                pages = []
        groups = self.engine.scheduler.memory.kv_config.groups
        page_bytes = sum(groups[page.group].page_bytes for page in pages)
        if pages:
            self._exports[client_index, number] = pages
        self._send_after_copies(client_index, HandOver(number, request.cached_tokens, page_bytes, pages), bool(pages))

    def release(self, client_index: int, number: int) -> None:
        """Release the pages that a request handed over. Ignore unknown numbers."""
        pages = self._exports.pop((client_index, number), None)
        if pages is not None and self._swap is not None:
            self._swap.release_exported(pages)

    def import_pages(self, client_index: int, message: ImportPages) -> None:
        """Copy the pages of another engine into the prefix cache."""
        if self._swap is None:
            raise InputError("this engine shares no host memory", "pages")
        if not all(self._swap.is_address(page) for page in message.pages):
            raise InputError("a page is outside of the shared host memory", "pages")
        is_asleep = self.engine.sleep_controller.level > 0
        is_imported = not is_asleep and self._swap.import_pages(message.pages)
        self._send_after_copies(client_index, Reply(message.key, value=int(is_imported)), is_imported)

    def _send_after_copies(self, client_index: int, message: EngineMessage, has_copies: bool) -> None:
        """Send a message once the pending page operations, if it waits for any, are done: the next plan has them."""
        self.engine.scheduler.flushes_page_ops |= has_copies
        self._waiting.append((self.engine.stats.steps + 1 if has_copies else 0, client_index, message))

    def take_sendable(self) -> list[tuple[int, EngineMessage]]:
        """Return the messages, with their clients, whose copies are done."""
        collected, last, sendable = self.engine.stats.steps - len(self.engine.in_flight), 0, []
        while self._waiting and self._waiting[0][0] <= collected:
            step, client_index, message = self._waiting.popleft()
            last = max(last, step)
            sendable.append((client_index, message))
        if last:
            cast(SharingRunner, self.engine.runner).wait_for_swaps()
        return sendable
