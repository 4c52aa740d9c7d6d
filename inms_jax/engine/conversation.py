"""The history of one agent: messages and generated token ids, and the token spans they make.

Every piece is tokenised on its own, so equal text gives equal tokens wherever it stands. Answers are kept
as token ids and never tokenised again. Knows nothing of pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inms_jax.engine.fragments import Decision, Mode, Part, Rules, place
from inms_jax.engine.segment import OnUpdate, Published, Segment
from inms_jax.errors import InvalidRequestError, TemplateError
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope
from inms_jax.text.chat import ChatTemplate, Message
from inms_jax.text.tokenizer import Tokenizer

_REPLY_MARK = "\ue000reply\ue001"  # private-use characters: no template trims or escapes them


@dataclass(frozen=True, slots=True)
class TextItem:
    """One message of the template."""

    role: str
    text: str
    scope: Scope
    published: str | None = None
    """The name under which it was published, if it was."""
    mode: Mode = Mode.PREFIX
    readers: int = 2
    root: tuple[Published, ...] = ()
    version: int = 1
    link_tokens: int | None = None
    repair_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class TokenItem:
    """Token ids outside the template."""

    token_ids: tuple[int, ...]
    scope: Scope


@dataclass(frozen=True, slots=True)
class ReplyItem:
    """An answer: what the model generated, closed by the template's end marker."""

    token_ids: tuple[int, ...]
    scope: Scope


Item = TextItem | TokenItem | ReplyItem
Newer = Callable[[str, int], tuple[Published, ...]]
"""The versions of a published text after a number."""


class SpanEncoder:
    """Text to token spans for one model, remembering what it has encoded (published text comes often)."""

    CACHED_CHARACTERS = 4 * 2**20  # a character takes about ten bytes with its share of the token ids
    SPAN_CHARACTERS = 100  # what a span takes besides, in the same measure

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, rules: Rules) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.rules = rules
        self._spans: dict[Scope, dict[tuple[str, str | None], Span]] = {}
        self._characters = 0

    def span(self, text: str, scope: Scope, published: str | None = None) -> Span:
        found = self._spans.get(scope, {}).get((text, published))
        if found is None:
            found = Span(tuple(self.tokenizer.encode(text)), scope, published is not None, published)
            self._characters += len(text) + self.SPAN_CHARACTERS
            if self._characters > self.CACHED_CHARACTERS:
                self._spans, self._characters = {}, len(text) + self.SPAN_CHARACTERS
            self._spans.setdefault(scope, {})[text, published] = found
        return found

    def forget(self, scope: Scope) -> None:
        """Keep no text of `scope` any longer: whoever it was of is gone."""
        gone = self._spans.pop(scope, {})
        self._characters -= sum(len(text) + self.SPAN_CHARACTERS for text, _ in gone)

    def parts(
        self,
        items: Sequence[Item],
        reader: Scope,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        generate: bool = False,
    ) -> list[Part]:
        """The segments of a whole conversation, one per item, then the generation prompt if `generate`."""
        if self.template is None:
            return self._with_bos([Part(span) for span in self._raw(items)])
        messages = [
            Message(item.role, item.text) if isinstance(item, TextItem) else Message("assistant", _REPLY_MARK)
            for item in items
            if not isinstance(item, TokenItem)
        ]
        pieces: Sequence[str] = ()
        plain: Sequence[str] = ()
        prompt = ""
        if messages or generate:
            split = self.template.split(messages, tools=tools, add_generation_prompt=generate)
            pieces = plain = split.pieces
            prompt = split.generation_prompt
            if tools:
                plain = self.template.split(messages, add_generation_prompt=generate).pieces
        found: list[Part] = []
        texts = iter(zip(pieces, plain, strict=True))
        for item in items:
            if isinstance(item, TokenItem):
                found.append(Part(Span(item.token_ids, item.scope)))
            elif isinstance(item, ReplyItem):
                found.append(Part(self._reply(next(texts)[0], item)))
            else:
                text, as_published = next(texts)
                if text == as_published:
                    span = self.span(text, item.scope, item.published)
                    root = self._root(item.root)
                    found.append(Part(span, item.mode, item.readers, root, item.link_tokens, item.repair_blocks))
                else:  # the template wrote tools into it: nobody published those
                    found.append(Part(self.span(text, reader)))
        if prompt:
            found.append(Part(self.span(prompt, reader)))
        return self._with_bos([part for part in found if part.span.tokens])

    def _root(self, texts: tuple[Published, ...]) -> tuple[Span, ...]:
        """A declared root, as a context of its own."""
        items = [TextItem(text.role, text.text, text.scope, text.name) for text in texts]
        return tuple(part.span for part in self.parts(items, texts[0].scope)) if texts else ()

    def _raw(self, items: Sequence[Item]) -> list[Span]:
        """A model without chat template takes token ids only."""
        if any(isinstance(item, TextItem) for item in items):
            raise InvalidRequestError(
                "this model has no chat template: use llm.generate, or give agents token ids as Segments"
            )
        return [Span(item.token_ids, item.scope) for item in items if not isinstance(item, TextItem)]

    def _reply(self, piece: str, item: ReplyItem) -> Span:
        if piece.count(_REPLY_MARK) != 1:
            raise TemplateError("the chat template does not render an assistant's content exactly once")
        before, after = piece.split(_REPLY_MARK)
        opening, closing = self.tokenizer.encode(before), self.tokenizer.encode(after)
        if closing and item.token_ids and item.token_ids[-1] == closing[0]:
            closing = closing[1:]  # the model generated the end marker itself
        return Span((*opening, *item.token_ids, *closing), item.scope)

    def _with_bos(self, parts: list[Part]) -> list[Part]:
        bos = self.tokenizer.bos_id
        if not self.tokenizer.add_bos or bos is None or not parts or parts[0].span.tokens[0] == bos:
            return parts
        first = parts[0].span
        return [replace(parts[0], span=replace(first, tokens=(bos, *first.tokens))), *parts[1:]]


class Conversation:
    """Items of one agent in order. Changed only by the engine thread, between turns."""

    def __init__(self, encoder: SpanEncoder, scope: Scope, items: Sequence[Item] = ()) -> None:
        self.encoder = encoder
        self.scope = scope
        """Private scope of what is written from now on; a fork gives each side a new one."""
        self.items: tuple[Item, ...] = tuple(items)
        self.tools: Sequence[dict[str, Any]] | None = None

    def item(self, part: Segment | Published) -> Item:
        """`part` as it enters this conversation."""
        if isinstance(part, Published):
            return TextItem(
                part.role,
                part.text,
                part.scope,
                part.name,
                part.mode,
                part.readers,
                part.root,
                part.version,
                part.link_tokens,
                part.repair_blocks,
            )
        if isinstance(part.content, str):
            return TextItem(part.role, part.content, self.scope)
        return TokenItem(tuple(part.content), self.scope)

    def own(self, item: Item) -> Item:
        """`item` with what is private in it belonging to this conversation's present line."""
        if isinstance(item, TextItem) and item.published is not None:
            return item
        return replace(item, scope=self.scope)

    def spans(
        self,
        extra: Sequence[Item] = (),
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        generate: bool,
    ) -> list[Span]:
        """The whole context: history, then `extra`, then the generation prompt if `generate`."""
        return self.placed((*self.items, *extra), tools=tools, generate=generate)[0]

    def placed(
        self, items: Sequence[Item], *, tools: Sequence[dict[str, Any]] | None = None, generate: bool
    ) -> tuple[list[Span], list[Decision]]:
        """The spans of a whole context, and for each of them whether it is read as a fragment, and why."""
        tools = self.tools if tools is None else tools
        parts = self.encoder.parts(items, self.scope, tools=tools, generate=generate)
        return place(parts, self.encoder.rules)

    def updated(self, newer: Newer) -> tuple[Item, ...]:
        """The items with the newer versions of published texts: each in the place of the one before, or at the end.

        A text is taken in the mode in which this conversation took the one before.
        """
        items = list(self.items)
        newest = {item.published: i for i, item in enumerate(items) if isinstance(item, TextItem) and item.published}
        for name, place_of in newest.items():
            at, held = place_of, items[place_of]
            assert isinstance(held, TextItem)
            for text in newer(name, held.version):
                item = self.item(
                    replace(
                        text,
                        mode=held.mode,
                        root=held.root,
                        link_tokens=held.link_tokens,
                        repair_blocks=held.repair_blocks,
                    )
                )
                if text.on_update is OnUpdate.REPLACE:
                    items[at] = item
                else:
                    at = len(items)
                    items.append(item)
        return tuple(items)

    def check(self, extra: Sequence[Item]) -> list[Span]:
        """The context with `extra` and a user's message after it; raises what rendering that raises."""
        if self.encoder.template is None:
            return self.spans(extra, generate=False)
        return self.spans((*extra, TextItem("user", "?", self.scope)), generate=True)

    def extend(self, extra: Sequence[Item]) -> None:
        self.items = (*self.items, *extra)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole history as token ids, closing markers included."""
        return tuple(token for span in self.spans(generate=False) for token in span.tokens)
