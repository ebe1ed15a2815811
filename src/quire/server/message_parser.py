"""Parse an output into a chat message in OpenAI's format: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from json.encoder import encode_basestring_ascii as quoted
from typing import NamedTuple

from quire.server.reasoning import ReasoningTokenCounter, RequestReasoning
from quire.server.tool_choice import ToolChoice
from quire.text.tool_parsers.base import ParsedEvent


class ParsedCall(NamedTuple):
    """A tool call, or a part of one. `id` and `name` are set only at the start of a call."""

    index: int  # type: ignore[assignment]  # hides tuple's method, which is not used
    id: str = ""
    name: str = ""
    arguments: str = ""

    def to_json(self, whole: bool) -> str:
        """Return the JSON of the call in a message (`whole`), or of a part of it in a delta, which has its index."""
        index = "" if whole else f'"index":{self.index},'
        head = f'"id":{quoted(self.id)},"type":"function",' if self.id else ""
        name = f'"name":{quoted(self.name)},' if self.id else ""
        return f'{{{index}{head}"function":{{{name}"arguments":{quoted(self.arguments)}}}}}'


class MessageParts(NamedTuple):
    """What an output adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def to_delta(self) -> str:
        """Return the delta of a chunk."""
        rest = self.reasoning or self.calls
        members = [f'"content":{quoted(self.content)}'] if self.content or not rest else []
        if self.reasoning:
            text = quoted(self.reasoning)
            members += [f'"reasoning_content":{text},"reasoning":{text}']
        if self.calls:
            members.append(f'"tool_calls":[{",".join(call.to_json(whole=False) for call in self.calls)}]')
        return "{" + ",".join(members) + "}"

    def to_message(self, echoed_text: str = "") -> str:
        """Return a whole message, whose text begins with `echoed_text`."""
        text = echoed_text + self.content
        content = "null" if not text and (self.calls or self.reasoning) else quoted(text)
        thoughts = f',"reasoning_content":{quoted(self.reasoning)},"reasoning":{quoted(self.reasoning)}'
        calls = f',"tool_calls":[{",".join(call.to_json(whole=True) for call in self.calls)}]'
        return (
            f'{{"role":"assistant","content":{content},"refusal":null'
            f"{thoughts if self.reasoning else ''}{calls if self.calls else ''}}}"
        )


class ChoiceParser:
    """Parses the text of one choice as it arrives. `reasoning` separates reasoning from the answer."""

    def __init__(self, tool_choice: ToolChoice, reasoning: RequestReasoning | None = None) -> None:
        self._tool_choice, self._reasoning = tool_choice, reasoning
        self._tool_parser = tool_choice.new_parser()
        self._reasoning_parser = None if reasoning is None else reasoning.new_parser()
        self._counter = None if reasoning is None else ReasoningTokenCounter(reasoning)
        self.has_call = False

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens so far."""
        return 0 if self._counter is None else self._counter.count

    def push(self, text: str, last: bool, tokens: Sequence[int] = ()) -> MessageParts:
        """Return what `text` adds to the message. `text` is the text of `tokens`, or arrives a little later. `last`:
        the output has ended."""
        reasoning, events = self._parse(text, last, tokens)
        return self._collect(events, reasoning)

    def push_runs(self, text: str, last: bool, tokens: Sequence[int] = ()) -> list[MessageParts]:
        """Like `push`, but return one entry for each run of reasoning, of text and of each call, in order."""
        reasoning, events = self._parse(text, last, tokens)
        return [MessageParts(reasoning=reasoning), *(self._collect(run) for _, run in groupby(events, _run_key))]

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason in OpenAI's format: "tool_calls" instead of "stop" if there is a call."""
        return "tool_calls" if self.has_call and reason == "stop" else reason

    def _parse(self, text: str, last: bool, tokens: Sequence[int]) -> tuple[str, list[ParsedEvent]]:
        """Return the reasoning to show, and the events of the answer's text."""
        reasoning = ""
        if self._reasoning_parser is not None and self._reasoning is not None and self._counter is not None:
            thought, text = self._reasoning_parser.push(text, last)
            self._counter.add(tokens)
            reasoning = thought if self._reasoning.is_returned else ""
            if not text and not (last and self._reasoning_parser.phase in ("after", "over")):
                return reasoning, []
        if self._tool_choice.mode == "named":  # all of the text is the arguments of one call
            head = [] if self.has_call else [ParsedEvent("call", self._tool_choice.named_tool)]
            return reasoning, [*head, *([ParsedEvent("arguments", text)] if text else [])]
        if self._tool_parser is None:
            return reasoning, [ParsedEvent("content", text)]
        events = self._tool_parser.feed(text)
        return reasoning, events + self._tool_parser.finish() if last else events

    def _collect(self, events: Iterable[ParsedEvent], reasoning: str = "") -> MessageParts:
        """Return the parts of the message in `events`. The pieces of a call are joined."""
        texts: list[str] = []
        calls: dict[int, ParsedCall] = {}
        for event in events:
            if event.kind == "content":
                texts.append(event.text)
            elif self._tool_choice.parallel or not event.index:
                self.has_call = True
                call = calls.get(event.index, ParsedCall(event.index))
                if event.kind == "call":
                    call = ParsedCall(event.index, self._tool_choice.new_call_id(), event.text)
                else:
                    call = call._replace(arguments=call.arguments + event.text)
                calls[event.index] = call
        return MessageParts("".join(texts), reasoning, tuple(calls.values()))


def _run_key(event: ParsedEvent) -> tuple[str, int]:
    return ("call" if event.kind == "arguments" else event.kind), event.index
