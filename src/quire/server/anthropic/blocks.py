"""Anthropic's messages as those of a chat. A message has blocks: texts, pictures, thoughts, uses of tools and their
results. Turns of one role that follow one another are one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import InputError, short_repr
from quire.server.adapter import Conversation, Json
from quire.text.chat_messages import MAX_MESSAGES

ROLES = ("user", "assistant", "system")
# Kinds of blocks by who may have them, and what is read of each.
BLOCK_TYPES = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "image"),
}
BLOCK_FIELDS = {
    "text": ("text",),
    "image": ("source",),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "tool_use": ("id", "name", "input"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
}
ERROR_PREFIX = "Error: "  # before the text of a result that is one


class MessageReader:
    """The conversation of a request. `ignored`: what nobody reads of its blocks."""

    def __init__(self, system: Any, messages: Any) -> None:
        self.conversation, self.ignored = Conversation(), dict[str, bool]()
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InputError(f"messages must be a list of objects, got {short_repr(messages)}", "messages")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InputError(f"messages must have 1 to {MAX_MESSAGES} entries, got {len(messages)}", "messages")
        if system is not None and system != []:
            self._add_turn("system", "system", system, "system")
        for i, message in enumerate(messages):
            at, role = f"messages[{i}]", message.get("role")
            if role not in ROLES:
                raise InputError(f"{at}.role must be one of {', '.join(ROLES)}, got {short_repr(role)}", "messages")
            self._ignore("message", message, ("role", "content"))
            self._add_turn(at, role, message.get("content"), f"{at}.content")
        for message in self.conversation.messages:
            message["content"] = message["content"] or ""
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        if self.conversation.last().get("tool_calls"):
            raise InputError(f"{at} uses a tool: the results come next, as tool_result of the user", "messages")

    def _add_turn(self, at: str, role: str, content: Any, path: str) -> None:
        blocks = self._read_blocks(path, content, role)
        if role == "assistant":
            self._add_assistant(at, blocks)
        elif role == "user":
            self._add_user(at, blocks)
        else:
            self.conversation.append(at, {"role": role, "content": []})
            self._add_parts([(place, {"type": "text", "text": block["text"]}) for place, block in blocks])

    def _read_blocks(self, at: str, content: Any, owner: str) -> list[tuple[str, Json]]:
        """Blocks, checked, with their places."""
        param = at.partition("[")[0]
        if isinstance(content, str):
            return [(at, {"type": "text", "text": content})]
        if not isinstance(content, list):
            raise InputError(f"{at} must be a string or a list of blocks, got {short_repr(content)}", param)
        found = []
        for i, block in enumerate(content):
            place = f"{at}[{i}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if not isinstance(kind, str) or kind not in BLOCK_TYPES[owner]:
                known = ", ".join(BLOCK_TYPES[owner])
                raise InputError(f"{place}.type is {short_repr(kind)}; {known} are supported for {owner}", param)
            self._ignore(kind, block, ("type", *BLOCK_FIELDS[kind]))
            for name in BLOCK_FIELDS[kind]:
                wanted = Mapping if name in ("source", "input") else str
                if name not in ("content", "is_error", "signature") and not isinstance(block.get(name), wanted):
                    what = "a string" if wanted is str else "an object"
                    raise InputError(f"{place}.{name} must be {what}, got {short_repr(block.get(name))}", param)
            found.append((place, block))
        return found

    def _ignore(self, prefix: str, given: Json, known: tuple[str, ...]) -> None:
        for name, value in given.items():
            if name not in known and value not in (None, [], {}):
                self.ignored[name if name == "cache_control" else f"{prefix}.{name}"] = True

    def _add_parts(self, parts: list[tuple[str, Json]]) -> None:
        """More of the last message."""
        last, at = self.conversation.last(), len(self.conversation.messages) - 1
        for place, part in parts:
            self.conversation.client_paths[f"messages[{at}].content[{len(last['content'])}]"] = place
            last["content"].append(part)

    def _add_user(self, at: str, blocks: list[tuple[str, Json]]) -> None:
        """Results of tools are messages of their own, and their pictures those of the user after them."""
        seen: list[tuple[str, Json]] = []
        said: list[tuple[str, Json]] = []
        for place, block in blocks:
            if block["type"] == "tool_result":
                if said:
                    raise InputError(f"{place} is a tool_result: these come before texts and images", "messages")
                seen += self._add_result(place, block)
            else:
                said.append((place, self._to_chat_part(place, block)))
        if parts := seen + said:
            if self.conversation.last().get("role") != "user":
                self.conversation.append(at, {"role": "user", "content": []})
            self._add_parts(parts)
        elif not blocks:
            raise InputError(f"{at}.content must have a block at least", "messages")

    def _add_result(self, at: str, block: Json) -> list[tuple[str, Json]]:
        """A tool's result. Returns its pictures."""
        failed = block.get("is_error")
        if failed is not None and type(failed) is not bool:
            raise InputError(f"{at}.is_error must be true or false, got {short_repr(failed)}", "messages")
        content = block.get("content")
        blocks = [] if content is None else self._read_blocks(f"{at}.content", content, "tool_result")
        texts = [inner["text"] for _, inner in blocks if inner["type"] == "text"]
        text = (ERROR_PREFIX if failed else "") + "\n".join(texts)
        self.conversation.append(at, {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        return [(place, self._to_chat_part(place, inner)) for place, inner in blocks if inner["type"] == "image"]

    def _to_chat_part(self, at: str, block: Json) -> Json:
        """A text, or a picture as a data: URI."""
        if block["type"] == "text":
            return {"type": "text", "text": block["text"]}
        source = block["source"]
        if source.get("type") != "base64":
            raise InputError(
                f"{at}.source.type is {short_repr(source.get('type'))}; only 'base64' is supported, no URL is fetched",
                "messages",
            )
        for name in ("media_type", "data"):
            if not isinstance(source.get(name), str):
                raise InputError(f"{at}.source.{name} must be a string, got {short_repr(source.get(name))}", "messages")
        return {"type": "image_url", "image_url": {"url": f"data:{source['media_type']};base64,{source['data']}"}}

    def _add_assistant(self, at: str, blocks: list[tuple[str, Json]]) -> None:
        """Thoughts that nobody here can read (redacted_thinking) are left out."""
        if self.conversation.last().get("role") != "assistant":
            self.conversation.append(at, {"role": "assistant", "content": []})
        message = self.conversation.last()
        number = len(self.conversation.messages) - 1
        for place, block in blocks:
            if block["type"] == "thinking" and block["thinking"]:
                message.setdefault("reasoning_content", []).append(block["thinking"])
            elif block["type"] == "text":
                self._add_parts([(place, self._to_chat_part(place, block))])
            elif block["type"] == "tool_use":
                calls = message.setdefault("tool_calls", [])
                self.conversation.client_paths[f"messages[{number}].tool_calls[{len(calls)}]"] = place
                function = {"name": block["name"], "arguments": block["input"]}
                calls.append({"id": block["id"], "type": "function", "function": function})
