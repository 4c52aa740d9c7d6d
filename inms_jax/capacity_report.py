"""The screen of `inms-jax plan`: what `capacity.py` found, as tables."""

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from inms_jax.capacity import BlockChoice, Capacity

GIB, MIB, KIB = 2**30, 2**20, 2**10


def print_capacity(found: Capacity, console: Console) -> None:
    """Print everything; `Capacity.to_json` has the same numbers and more."""
    console.print(Group(_model(found), _memory(found), _agents(found), _block_sizes(found), _verdict(found)))


def _size(value: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value >= unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.0f} B"


def _fit(agents: int | None) -> str:
    return "any number" if agents is None else f"{agents:,}"


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i else "left", no_wrap=True)
    return table


def _model(found: Capacity) -> RenderableType:
    model = found.model
    head = Text(
        f"{model.name}: {model.num_layers} layers, {model.num_kv_heads} kv heads of {model.head_dim}, "
        f"{_size(found.kv_bytes_per_token)} of KV a token ({found.kv_dtype})",
        style="bold",
    )
    if not found.beyond_model:
        return head
    return Group(
        head,
        Text(
            f"A context of {found.work.context:,} tokens is beyond this model: it was made for at most "
            f"{model.max_position_embeddings:,} positions, and an engine refuses longer ones. The numbers below are "
            "the arithmetic of the question as asked.",
            style="yellow",
        ),
    )


def _memory(found: Capacity) -> RenderableType:
    table = _table("memory", "size", "")
    table.columns[2].justify = "left"
    kept = found.memory_bytes - found.pool_budget - found.weight_bytes
    chosen = found.chosen
    table.add_row("device", _size(found.memory_bytes), "")
    table.add_row("kept free", _size(kept), "for programs and their temporaries")
    table.add_row("weights", _size(found.weight_bytes), found.dtype)
    pages = f"{chosen.pool_pages:,} pages of {_size(chosen.page_bytes)}, one of them the null page"
    table.add_row("KV pages", _size(chosen.pool_pages * chosen.page_bytes), pages)
    return table


def _agents(found: Capacity) -> RenderableType:
    work, chosen = found.work, found.chosen
    published = "text" if work.texts == 1 else "texts"
    title = (
        f"{work.agents} agents of {work.context:,} tokens, {work.public_tokens:,} of them in {work.texts} published "
        f"{published}; pages of {chosen.block_size} tokens"
    )
    table = _table("", "pages", "KV", "of the pool", "agents that fit")

    def row(name: str, pages: int, held: int, fit: int | None) -> None:
        part = f"{pages / chosen.usable_pages:.0%}" if chosen.usable_pages else "-"
        table.add_row(name, f"{pages:,}", _size(held), part, _fit(fit))

    row("without sharing", chosen.independent_pages, chosen.independent_bytes, chosen.independent_agents)
    row("with sharing", chosen.shared_pages, chosen.shared_bytes, chosen.shared_agents)
    table.add_row("tokens alone, without", "", _size(found.independent_tokens_bytes), "", "", style="dim")
    table.add_row("tokens alone, with", "", _size(found.shared_tokens_bytes), "", "", style="dim")
    note = Text("  tokens alone: as if pages had no edges\n", style="dim")
    return Group(Text(title, style="bold"), table, note)


def _block_sizes(found: Capacity) -> RenderableType:
    table = _table(
        "block\nsize", "page", "pool\npages", "pages\nwithout", "\nwith", "empty\nslots", "agents\nwithout", "\nwith"
    )
    for choice in found.others:
        mark = " <" if choice.block_size == found.chosen.block_size else ""
        table.add_row(
            f"{choice.block_size}{mark}",
            _size(choice.page_bytes),
            f"{choice.pool_pages:,}",
            f"{choice.independent_pages:,}",
            f"{choice.shared_pages:,}",
            f"{_empty(found, choice):.1%}",
            _fit(choice.independent_agents),
            _fit(choice.shared_agents),
        )
    note = Text("  empty slots: part of the pages held with sharing that holds no token\n", style="dim")
    return Group(Text("Other block sizes, without and with sharing", style="bold"), table, note)


def _empty(found: Capacity, choice: BlockChoice) -> float:
    slots = choice.shared_pages * choice.block_size
    return 1 - found.work.unique_tokens / slots


def _verdict(found: Capacity) -> RenderableType:
    chosen, agents = found.chosen, f"{found.work.agents} agents"

    def missing(pages: int) -> str:
        return _size((pages - chosen.usable_pages) * chosen.page_bytes)

    alone, together = (p <= chosen.usable_pages for p in (chosen.independent_pages, chosen.shared_pages))
    if alone and together:
        text = f"{agents} fit, without sharing and with it."
    elif together:
        text = f"{agents} fit with sharing; without it {missing(chosen.independent_pages)} are missing."
    elif alone:
        text = f"{agents} fit without sharing; with it {missing(chosen.shared_pages)} are missing."
    else:
        without, shared = missing(chosen.independent_pages), missing(chosen.shared_pages)
        text = f"{agents} do not fit: {without} are missing without sharing, {shared} with it."
    engine = f"LLM(..., block_size={chosen.block_size}, kv_cache_memory={found.pool_budget})"
    return Group(Text(text, style="bold"), Text(engine, style="dim"))
