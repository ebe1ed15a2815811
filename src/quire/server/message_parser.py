"""Parse an output into a chat message in OpenAI's format: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from json.encoder import encode_basestring_ascii as quoted
from typing import NamedTuple

from quire.server.reasoning import RequestReasoning
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
        self._counter = None if reasoning is None else reasoning.new_counter()
        self.has_call = False

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens so far."""
        return 0 if self._counter is None else self._counter.count

    def push(self, text: str, last: bool, tokens: Sequence[int] = ()) -> MessageParts:
        """Return what `text` adds to the message. `text` is the text of `tokens`, or arrives a little later. `last`:
        the output has ended."""
        thought, text, due = self._split_reasoning(text, last, tokens)
        parts = self._parse_answer(text, last) if due else MessageParts()
        return parts._replace(reasoning=thought) if thought else parts

    def push_runs(self, text: str, last: bool, tokens: Sequence[int] = ()) -> list[MessageParts]:
        """Like `push`, but return one entry for each run of reasoning, of text and of each call, in order."""
        reasoning, text, due = self._split_reasoning(text, last, tokens)
        runs = [MessageParts(reasoning=reasoning)]
        if due and (self._tool_choice.mode == "named" or self._tool_parser is None):
            runs.append(self._parse_answer(text, last))
        elif due:
            runs += [self._collect(run) for _, run in groupby(self._parse_events(text, last), _run_key)]
        return runs

    def _split_reasoning(self, text: str, last: bool, tokens: Sequence[int]) -> tuple[str, str, bool]:
        """Return the reasoning to show, the answer's text, and whether the answer is to be parsed."""
        if self._reasoning_parser is None or self._reasoning is None or self._counter is None:
            return "", text, True
        thought, text = self._reasoning_parser.push(text, last)
        self._counter.add(tokens)
        over = last and self._reasoning_parser.phase in ("after", "over")
        return (thought if self._reasoning.is_returned else ""), text, bool(text) or over

    def _parse_answer(self, text: str, last: bool) -> MessageParts:
        if self._tool_choice.mode == "named":
            return self._named_call(text)
        if self._tool_parser is None:
            return MessageParts(text)
        return self._collect(self._parse_events(text, last))

    def _parse_events(self, text: str, last: bool) -> list[ParsedEvent]:
        assert self._tool_parser is not None, "called without a tool parser"
        events = self._tool_parser.feed(text)
        return events + self._tool_parser.finish() if last else events

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason in OpenAI's format: "tool_calls" instead of "stop" if there is a call."""
        return "tool_calls" if self.has_call and reason == "stop" else reason

    def _named_call(self, text: str) -> MessageParts:
        """Return a call of the named tool: all of the text is its arguments."""
        if self.has_call:
            return MessageParts(calls=(ParsedCall(0, arguments=text),) if text else ())
        self.has_call = True
        return MessageParts(calls=(ParsedCall(0, self._tool_choice.new_call_id(), self._tool_choice.named_tool, text),))

    def _collect(self, events: Iterable[ParsedEvent]) -> MessageParts:
        collector = MessageCollector(self._tool_choice.new_call_id)
        for event in events:
            if event.kind in ("call", "arguments"):
                if event.index and not self._tool_choice.parallel:
                    continue
                self.has_call = True
            collector.add(event)
        return collector.to_parts()


def _run_key(event: ParsedEvent) -> tuple[str, int]:
    return ("call" if event.kind == "arguments" else event.kind), event.index


class MessageCollector:
    """Collects parser events into one MessageParts. The pieces of a call are joined."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._heads: dict[int, tuple[str, str]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, event: ParsedEvent) -> None:
        """Add an event."""
        if event.kind == "call":
            self._heads[event.index] = self._new_id(), event.text
            self._arguments[event.index] = []
        elif event.kind == "arguments":
            self._arguments.setdefault(event.index, []).append(event.text)
        else:
            self._texts[event.kind].append(event.text)

    def to_parts(self) -> MessageParts:
        """Return the collected parts."""
        calls = [
            ParsedCall(index, *self._heads.get(index, ("", "")), "".join(texts))
            for index, texts in self._arguments.items()
        ]
        content, reasoning = ("".join(self._texts[kind]) for kind in ("content", "reasoning"))
        return MessageParts(content, reasoning, tuple(calls))
