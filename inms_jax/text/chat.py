"""A conversation to one piece of text a message, so that equal messages give equal tokens wherever they stand.

The model's own template renders the whole conversation; the text is then cut at the boundaries of messages, and
template text goes with the message it wraps. `"".join(pieces)` is always the one-shot rendering. How boundaries
are found, in `_Layout`: contents are rendered again with marks inside, and what precedes and follows the marks
tells where each content lies. Knows nothing of who may see which message.
"""

import bisect
import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from inms_jax.errors import TemplateError
from inms_jax.text.merge import Message, Rendered, SystemRule, merge
from inms_jax.text.sandbox import CompiledTemplate
from inms_jax.text.tokenizer import Tokenizer

__all__ = ["BoundaryDifference", "ChatTemplate", "Message", "SplitChat", "boundary_report"]

# Private use characters: no template takes them for letters, space or markup. One for each end of each content.
_MARKS: Final = range(0xF0000, 0xFFFFE)
_MARK: Final = re.compile("[\U000f0000-\U000ffffd]")

_Where = tuple[int, int]  # (rendered message, part of it)
_Offsets = tuple[int, int]  # places of the two marks in a content


@dataclasses.dataclass(frozen=True, slots=True)
class SplitChat:
    """One piece a message, in order, and the text that asks for an answer (empty if it was not asked for)."""

    pieces: tuple[str, ...]
    generation_prompt: str

    @property
    def text(self) -> str:
        """The one-shot rendering."""
        return "".join(self.pieces) + self.generation_prompt


@dataclasses.dataclass(frozen=True, slots=True)
class BoundaryDifference:
    """Tokens that differ between piece by piece and one shot; the first of them is in piece `piece`."""

    piece: int
    pieces_ids: tuple[int, ...]
    one_shot_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """Where one content lies in a rendering."""

    begin: int
    end: int


class ChatTemplate:
    """One model's template. `system_rule` says what is done with system messages that it refuses or misplaces."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = CompiledTemplate(source)

    @functools.cached_property
    def system_rule(self) -> SystemRule:
        """Found once, by trying short conversations, so that it never depends on the conversation at hand."""
        trials = {
            SystemRule.KEEP: "system system user assistant system user",
            SystemRule.HEAD: "system user assistant user",
        }
        for rule, roles in trials.items():
            messages = [Message(role, f"text {i}") for i, role in enumerate(roles.split())]
            try:
                self._layout(messages, SystemRule.KEEP, {})
            except TemplateError:
                continue
            return rule
        return SystemRule.USER

    def render(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """The whole conversation in one shot, system messages merged by `system_rule`."""
        rendered = merge(messages, self.system_rule)
        return self._render(rendered, [r.content for r in rendered], _extra(tools), add_generation_prompt)

    def split(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> SplitChat:
        """Cut the rendering into one piece a message. Text before the first message (BOS, a default system
        message, tools) belongs to the first piece. Raises `TemplateError` where the template cannot be cut."""
        if not messages:
            raise TemplateError("There are no messages to render.")
        layout = self._layout(messages, self.system_rule, _extra(tools))
        prompt = self._generation_prompt(layout, _extra(tools)) if add_generation_prompt else ""
        return SplitChat(layout.pieces(), prompt)

    def generation_prompt(self, messages: Sequence[Message], *, tools: Any = None) -> str:
        """The text after these messages that asks for an answer."""
        return self.split(messages, tools=tools, add_generation_prompt=True).generation_prompt

    def closing(self, messages: Sequence[Message], *, tools: Any = None) -> str:
        """The text after an assistant's content, end marker included, in an answer to these messages (or in the
        last of them, if that is the answer)."""
        if not messages or messages[-1].role != "assistant":
            messages = [*messages, Message("assistant", "answer")]
        layout = self._layout(messages, self.system_rule, _extra(tools))
        return layout.text[layout.spans[-1].end :]

    def _layout(self, messages: Sequence[Message], rule: SystemRule, extra: Mapping[str, Any]) -> "_Layout":
        rendered = merge(messages, rule)
        return _Layout(
            rendered, len(messages), lambda upto, contents: self._render(rendered[:upto], contents, extra, False)
        )

    def _generation_prompt(self, layout: "_Layout", extra: Mapping[str, Any]) -> str:
        asked = self._render(layout.rendered, [r.content for r in layout.rendered], extra, True)
        if not asked.startswith(layout.text):
            raise TemplateError(
                "The chat template changes earlier text when it asks for an answer, so the generation prompt"
                " cannot be told from the messages."
            )
        return asked[len(layout.text) :]

    def _render(
        self, rendered: Sequence[Rendered], contents: Sequence[str], extra: Mapping[str, Any], prompt: bool
    ) -> str:
        messages = [
            {"role": r.role, "content": content} | ({} if r.name is None else {"name": r.name})
            for r, content in zip(rendered, contents, strict=True)
        ]
        return self._template.render(
            {**self._variables, **extra, "messages": messages, "add_generation_prompt": prompt}
        )


class _Layout:
    """The rendering of one conversation and where each message's content lies in it."""

    def __init__(self, rendered: Sequence[Rendered], count: int, render: Callable[[int, Sequence[str]], str]) -> None:
        self.rendered = rendered
        self._render = render
        self._contents = [r.content for r in rendered]
        self.text = render(len(rendered), self._contents)
        self.spans = self._find(len(rendered), self.text)
        for i, (before, after) in enumerate(zip(self.spans, self.spans[1:], strict=False)):
            if before.end > after.begin:
                raise TemplateError(f"The chat template renders message {i + 1} before the end of message {i}.")

    def pieces(self) -> tuple[str, ...]:
        """The text cut between messages."""
        cuts, message = [0], 0
        for index, group in enumerate(self.rendered):
            # Messages merged into one: the separator stays with the message before it.
            cuts += [self.spans[message + k].begin for k in range(1, len(group.parts))]
            message += len(group.parts)
            if index + 1 < len(self.rendered):
                cuts.append(self._boundary(index, self.spans[message - 1], self.spans[message]))
        cuts.append(len(self.text))
        return tuple(self.text[a:b] for a, b in itertools.pairwise(cuts))

    def _boundary(self, index: int, before: _Span, after: _Span) -> int:
        """Where rendered message `index` ends: what the template writes after it when it is the last. Where that
        does not fit, the template text between two messages goes with the first, so that the second still starts
        at its content."""
        try:
            shorter = self._render(index + 1, self._contents[: index + 1])
            if self.text.startswith(shorter) and before.end <= len(shorter) <= after.begin:
                return len(shorter)
            closing = shorter[self._find(index + 1, shorter)[-1].end :]
        except TemplateError:  # a template may refuse a conversation that stops here
            return after.begin
        cut = before.end + len(closing)
        return cut if self.text[before.end : cut] == closing and cut <= after.begin else after.begin

    def _find(self, upto: int, text: str) -> list[_Span]:
        """Spans of all contents in `text`, the rendering of the first `upto` rendered messages."""
        parts = [(group, part) for group in range(upto) for part in range(len(self.rendered[group].parts))]
        together = self._marked(upto, text, {where: _edges(self._part(where)) for where in parts})
        if together is not None:
            return together
        # A template that looks at contents may treat a marked one otherwise: one at a time, and elsewhere.
        return [self._find_one(upto, text, where, number) for number, where in enumerate(parts)]

    def _find_one(self, upto: int, text: str, where: _Where, number: int) -> _Span:
        for offsets in _candidates(self._part(where)):
            found = self._marked(upto, text, {where: offsets})
            if found is not None:
                return found[0]
        raise TemplateError(
            f"The chat template cannot be split: message {number} ({self.rendered[where[0]].role!r}) is not"
            " rendered exactly once, or is rendered otherwise than it was written."
        )

    def _part(self, where: _Where) -> str:
        return self.rendered[where[0]].parts[where[1]]

    def _marked(self, upto: int, text: str, offsets: Mapping[_Where, _Offsets]) -> list[_Span] | None:
        """Render with marks in each content of `offsets`; None unless they come out once each and in order, and
        taking them out gives `text` again."""
        marks = _unused_marks(2 * len(offsets), text, self._contents)
        pairs = dict(zip(offsets, zip(marks[::2], marks[1::2], strict=True), strict=True))

        def insert(where: _Where) -> str:
            part = self._part(where)
            if where not in offsets:
                return part
            (a, b), (first, last) = offsets[where], pairs[where]
            return part[:a] + first + part[a:b] + last + part[b:]

        contents = [
            group.join([insert((g, p)) for p in range(len(group.parts))])
            for g, group in enumerate(self.rendered[:upto])
        ]
        try:
            marked = self._render(upto, contents)
        except TemplateError:
            return None
        seen = [(m.group(), m.start()) for m in _MARK.finditer(marked) if m.group() in set(marks)]
        if [mark for mark, _ in seen] != marks or marked.translate(dict.fromkeys(map(ord, marks))) != text:
            return None
        places = [at - earlier for earlier, (_, at) in enumerate(seen)]
        return [
            _grow(text, self._part(where), places[2 * k], places[2 * k + 1], offset)
            for k, (where, offset) in enumerate(offsets.items())
        ]


def _grow(text: str, part: str, begin: int, end: int, offsets: _Offsets) -> _Span:
    """From the marks outwards, as far as `text` shows the content. The space before it is its own and not its
    neighbour's; the space after it may be the template's."""
    a, b = offsets
    while a > 0 and begin > 0 and text[begin - 1] == part[a - 1]:
        begin, a = begin - 1, a - 1
    while b < len(part.rstrip()) and end < len(text) and text[end] == part[b]:
        end, b = end + 1, b + 1
    return _Span(begin, end)


def _edges(part: str) -> tuple[int, int]:
    """Just inside the first and the last character that is not space, which trimming leaves alone."""
    head, tail = len(part) - len(part.lstrip()), len(part.rstrip())
    if head >= tail:
        return len(part), len(part)
    return head + 1, max(tail - 1, head + 1)


def _candidates(part: str) -> Iterator[tuple[int, int]]:
    first, last = _edges(part)
    middle = (first + last) // 2
    yield from dict.fromkeys(
        [(first, last), (last, last), (middle, middle), (first, first), ((middle + last) // 2,) * 2]
    )


def _unused_marks(count: int, text: str, contents: Sequence[str]) -> list[str]:
    used = set(_MARK.findall(text)).union(*(_MARK.findall(content) for content in contents))
    free = [mark for mark in map(chr, _MARKS[: count + len(used)]) if mark not in used]
    if len(free) < count:
        raise TemplateError(f"{count} private-use characters are needed as marks, {len(free)} are unused.")
    return free[:count]


def _extra(tools: Any) -> dict[str, Any]:
    return {} if tools is None else {"tools": tools}


def boundary_report(split: SplitChat, tokenizer: Tokenizer) -> tuple[BoundaryDifference, ...]:
    """Where the tokens of the pieces differ from one-shot tokens; empty if nowhere."""
    ids = [tokenizer.encode(piece) for piece in (*split.pieces, split.generation_prompt)]
    joined, one_shot = list(itertools.chain.from_iterable(ids)), tokenizer.encode(split.text)
    ends = list(itertools.accumulate(map(len, ids)))
    changes = difflib.SequenceMatcher(None, joined, one_shot, autojunk=False).get_opcodes()
    return tuple(
        BoundaryDifference(bisect.bisect_right(ends, a), tuple(joined[a:b]), tuple(one_shot[c:d]))
        for kind, a, b, c, d in changes
        if kind != "equal"
    )
