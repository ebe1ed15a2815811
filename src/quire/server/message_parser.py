"""An answer's message as OpenAI has it: text, thoughts and calls, from what a reader finds in the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from json.encoder import encode_basestring_ascii as quoted
from typing import NamedTuple

from quire.server.reasoning import RequestReasoning
from quire.server.tool_choice import ToolChoice
from quire.text.tool_parsers.base import ParsedEvent


class ParsedCall(NamedTuple):
    """A call, or a part of one: `id` and `name` are those of a call that begins here."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def to_json(self, whole: bool) -> str:
        """The call in a message, or with its index a part of it in a delta."""
        index = "" if whole else f'"index":{self.index},'
        head = f'"id":{quoted(self.id)},"type":"function",' if self.id else ""
        name = f'"name":{quoted(self.name)},' if self.id else ""
        return f'{{{index}{head}"function":{{{name}"arguments":{quoted(self.arguments)}}}}}'


class MessageParts(NamedTuple):
    """What some of an output adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def to_delta(self) -> str:
        """A chunk's delta."""
        rest = self.reasoning or self.calls
        members = [f'"content":{quoted(self.content)}'] if self.content or not rest else []
        if self.reasoning:
            text = quoted(self.reasoning)
            members += [f'"reasoning_content":{text},"reasoning":{text}']
        if self.calls:
            members.append(f'"tool_calls":[{",".join(call.to_json(whole=False) for call in self.calls)}]')
        return "{" + ",".join(members) + "}"

    def to_message(self, echoed_text: str = "") -> str:
        """A whole message, whose text begins with `echoed_text`."""
        text = echoed_text + self.content
        content = "null" if not text and (self.calls or self.reasoning) else quoted(text)
        thoughts = f',"reasoning_content":{quoted(self.reasoning)},"reasoning":{quoted(self.reasoning)}'
        calls = f',"tool_calls":[{",".join(call.to_json(whole=True) for call in self.calls)}]'
        return (
            f'{{"role":"assistant","content":{content},"refusal":null'
            f"{thoughts if self.reasoning else ''}{calls if self.calls else ''}}}"
        )


class ChoiceParser:
    """One choice: its text, as it comes. `reasoning` tells thoughts from what follows them."""

    def __init__(self, tool_choice: ToolChoice, reasoning: RequestReasoning | None = None) -> None:
        self._tool_choice, self._reasoning = tool_choice, reasoning
        self._tool_parser = tool_choice.new_parser()
        self._reasoning_parser = None if reasoning is None else reasoning.new_parser()
        self._counter = None if reasoning is None else reasoning.new_counter()
        self.has_call = False  # there is a call in it

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts so far."""
        return 0 if self._counter is None else self._counter.count

    def push(self, text: str, last: bool, tokens: Sequence[int] = ()) -> MessageParts:
        """What `text` adds, which is that of `tokens` or comes a little later; with `last` the output has ended."""
        thought, text, due = self._split_reasoning(text, last, tokens)
        parts = self._parse_answer(text, last) if due else MessageParts()
        return parts._replace(reasoning=thought) if thought else parts

    def push_runs(self, text: str, last: bool, tokens: Sequence[int] = ()) -> list[MessageParts]:
        """As `push`, but what comes one after the other stays apart: thoughts, texts, each call."""
        thought, text, due = self._split_reasoning(text, last, tokens)
        found = [MessageParts(reasoning=thought)]
        if due and (self._tool_choice.mode == "named" or self._tool_parser is None):
            found.append(self._parse_answer(text, last))
        elif due:
            found += [self._collect(run) for _, run in groupby(self._parse_events(text, last), _run_key)]
        return found

    def _split_reasoning(self, text: str, last: bool, tokens: Sequence[int]) -> tuple[str, str, bool]:
        """The thoughts to show, the answer's text, and whether that is to be read."""
        if self._reasoning_parser is None or self._reasoning is None or self._counter is None:
            return "", text, True
        thought, text = self._reasoning_parser.push(text, last)
        self._counter.add(tokens)
        over = last and self._reasoning_parser.phase in ("behind", "over")
        return (thought if self._reasoning.is_returned else ""), text, bool(text) or over

    def _parse_answer(self, text: str, last: bool) -> MessageParts:
        if self._tool_choice.mode == "named":
            return self._named_call(text)
        if self._tool_parser is None:
            return MessageParts(text)
        return self._collect(self._parse_events(text, last))

    def _parse_events(self, text: str, last: bool) -> list[ParsedEvent]:
        assert self._tool_parser is not None, "who has none doesn't ask"
        events = self._tool_parser.feed(text)
        return events + self._tool_parser.finish() if last else events

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI has it: a call is a reason to end."""
        return "tool_calls" if self.has_call and reason == "stop" else reason

    def _named_call(self, text: str) -> MessageParts:
        """All of it is the arguments of the named tool."""
        if self.has_call:
            return MessageParts(calls=(ParsedCall(0, arguments=text),) if text else ())
        self.has_call = True
        return MessageParts(calls=(ParsedCall(0, self._tool_choice.new_call_id(), self._tool_choice.named_tool, text),))

    def _collect(self, events: Iterable[ParsedEvent]) -> MessageParts:
        found = MessageCollector(self._tool_choice.new_call_id)
        for event in events:
            if event.kind in ("call", "arguments"):
                if event.index and not self._tool_choice.parallel:
                    continue
                self.has_call = True
            found.add(event)
        return found.to_parts()


def _run_key(event: ParsedEvent) -> tuple[str, int]:
    return ("call" if event.kind == "arguments" else event.kind), event.index


class MessageCollector:
    """Events as the parts of one message; pieces of one call are one part of it."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._heads: dict[int, tuple[str, str]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, event: ParsedEvent) -> None:
        """One more."""
        if event.kind == "call":
            self._heads[event.index] = self._new_id(), event.text
            self._arguments[event.index] = []
        elif event.kind == "arguments":
            self._arguments.setdefault(event.index, []).append(event.text)
        else:
            self._texts[event.kind].append(event.text)

    def to_parts(self) -> MessageParts:
        """All of them."""
        calls = [
            ParsedCall(index, *self._heads.get(index, ("", "")), "".join(texts))
            for index, texts in self._arguments.items()
        ]
        content, reasoning = ("".join(self._texts[kind]) for kind in ("content", "reasoning"))
        return MessageParts(content, reasoning, tuple(calls))
