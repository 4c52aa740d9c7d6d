"""Page counts worked out by hand."""

from dataclasses import replace

from inms_jax.memory.prediction import Context, Piece, predict_pages

SYSTEM = Piece("system", 300, 0, "t", published=True)
TOOLS = Piece("tools", 128, 0, "t", published=True)
DECISIONS = Piece("decisions", 100, 1, "g", published=True)


def notes(agent: str, length: int, text: str = "notes") -> Piece:
    return Piece(text, length, 2, agent)


def test_no_context_needs_no_page():
    assert predict_pages([], 128) == 0
    assert predict_pages([Context((), "a")], 128) == 0


def test_one_private_stream_is_its_length_over_the_block_size_rounded_up():
    assert predict_pages([Context((notes("a", 100), notes("a", 28, "x"), notes("a", 1, "y")), "a")], 128) == 2


def test_published_pieces_end_their_pages():
    # system 300 = 128 + 128 + 44; tools 128; decisions 100; notes 130 = 128 + 2: in all 3 + 1 + 1 + 2
    assert predict_pages([Context((SYSTEM, TOOLS, DECISIONS, notes("a", 130)), "a")], 128) == 7


def test_three_agents_store_the_shared_head_once():
    contexts = [Context((SYSTEM, TOOLS, DECISIONS, notes(n, 130)), n) for n in "abc"]
    assert predict_pages(contexts, 128) == 5 + 3 * 2


def test_one_owner_shares_full_blocks_but_not_a_last_one_that_may_grow():
    assert predict_pages([Context((notes("plain", 200),), 1), Context((notes("plain", 200),), 2)], 128) == 1 + 2


def test_a_fork_that_wrote_nothing_shares_its_last_page_too():
    assert predict_pages([Context((notes("a", 200),), 1), Context((notes("a", 200),), 1)], 128) == 2


def test_published_text_after_private_text_is_private():
    # 30 private + 100 of the group = 130 = 128 + 2 in one stream, and nothing is shared
    contexts = [Context((notes(n, 30), DECISIONS), n) for n in "ab"]
    assert predict_pages(contexts, 128) == 4


def test_equal_text_after_different_text_is_stored_again():
    one = Context((SYSTEM, TOOLS), "a")
    other = Context((TOOLS, SYSTEM), "b")
    assert predict_pages([one, other], 128) == 4 + 4


DOCUMENT = Piece(
    "document", 10, 0, "acme", published=True, root=(Piece("system", 6, 0, "acme", published=True),), link=3
)


def test_a_fragment_is_stored_once_beside_the_link_tokens_of_each_reader():
    system = Piece("system", 6, 0, "acme", published=True)

    def reader(name: str, length: int) -> Context:
        return Context((system, notes(name, length), DOCUMENT, notes(name, 2, "question")), name)

    # Pages of 4: system 2, the body 3; notes, link and question of each reader are packed.
    assert predict_pages([reader("a", 5)], 4) == 2 + 3 + 3
    assert predict_pages([reader("a", 5), reader("b", 12)], 4) == 2 + 3 + 3 + 5


def test_blocks_that_only_the_link_tokens_would_need_are_not_held():
    long_link = replace(DOCUMENT, link=8)
    context = Context((notes("a", 4), long_link, notes("a", 1, "question")), "a")
    assert predict_pages([context], 4) == 4 + 1  # the document stands in pages of 4, 4 and 2: only the last is read


def test_the_same_text_after_different_fragments_is_stored_again():
    def after(identity: str) -> Context:
        document = replace(DOCUMENT, identity=identity, length=8, link=0)
        return Context((notes("a", 4), document, notes("a", 4, "same"), notes("a", 1, "more")), ("holder", identity))

    assert predict_pages([after("x"), after("x")], 4) == 1 + 2 + 1 + 1
    assert predict_pages([after("x"), after("y")], 4) == 1 + 2 * (2 + 1 + 1)
