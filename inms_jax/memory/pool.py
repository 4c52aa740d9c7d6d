"""The page pool: free list, reference counts, generations, the state of each page and the books it is charged to.

Knows nothing of tokens, scopes or who holds a page. Page 0 is the null page and is never given out.
"""

from inms_jax.errors import CapacityError, ConfigError, StateError
from inms_jax.memory.lifecycle import PAGE_TRANSITIONS, PageEvent, PageState, advance
from inms_jax.memory.plan import NULL_PAGE
from inms_jax.memory.quota import Book


class PagePool:
    """Pages 1 .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"A pool needs at least 2 pages (one is the null page), got {num_pages}.")
        self.num_pages = num_pages
        self._state = [PageState.FREE] * num_pages
        self._references = [0] * num_pages
        self._generation = [0] * num_pages
        # Popped from the end: the lowest free page first, then the one freed last.
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._books: list[tuple[Book, ...]] = [()] * num_pages
        # Pages that were in use and were freed since somebody asked, if somebody does.
        self.freed: set[int] | None = None

    def state(self, page: int) -> PageState:
        return self._state[page]

    def references(self, page: int) -> int:
        return self._references[page]

    def generation(self, page: int) -> int:
        """How often the page has been freed: tells two uses of one page apart."""
        return self._generation[page]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def books(self, page: int) -> tuple[Book, ...]:
        """What the page is charged to: a pool, and then an account if one pays for it."""
        return self._books[page]

    def recharge(self, page: int, books: tuple[Book, ...]) -> None:
        """Charge a page that is not free to other books."""
        state = self._state[page]
        for book in self._books[page]:
            book.states[state] -= 1
        for book in books:
            book.states[state] += 1
        self._books[page] = books

    def move(self, page: int, event: PageEvent) -> None:
        """Advance the state of a page; an illegal event raises StateError and changes nothing."""
        if not NULL_PAGE < page < self.num_pages:
            raise StateError(f"Page {page} is not one of pages 1..{self.num_pages - 1}.")
        before = self._state[page]
        after = advance(PAGE_TRANSITIONS, before, event, f"Page {page}")
        self._state[page] = after
        for book in self._books[page]:
            book.states[before] -= 1
            book.states[after] += 1

    def allocate(self, books: tuple[Book, ...] = ()) -> int:
        """Take a free page, with one reference, and charge it to `books`."""
        try:
            page = self._free.pop()
        except IndexError:
            raise CapacityError(
                f"Cannot allocate 1 page: 0 of {self.num_pages - 1} are free. Close an agent or enlarge the pool."
            ) from None
        try:
            self._state[page] = advance(PAGE_TRANSITIONS, self._state[page], PageEvent.ALLOCATE, f"Page {page}")
            self._references[page] = 1
            self.recharge(page, books)
        except BaseException:
            self.force(page, PageState.FREE, 0)
            raise
        return page

    def force(self, page: int, state: PageState, references: int) -> None:
        """Put a page that somebody has, but that is not in order, into a state; what it is charged to is unknown then.

        For repairs: the table of transitions says nothing of an operation that was broken off.
        """
        self._state[page], self._references[page], self._books[page] = state, references, ()
        if state is PageState.FREE:
            self._generation[page] += 1
            self._free.append(page)
            if self.freed is not None:
                self.freed.add(page)

    def retain(self, page: int) -> None:
        """One more holder of a page that is in use; a CACHED page comes back to use."""
        if self._references[page] == 0:
            self.move(page, PageEvent.HIT)
        self._references[page] += 1

    def release(self, page: int) -> int:
        """One holder less; the number left. Raises StateError when nobody holds the page."""
        if self._references[page] == 0:
            raise StateError(
                f"Page {page} (generation {self._generation[page]}) is released, but it is "
                f"{self._state[page].value!r} and has 0 holders: a double release."
            )
        self._references[page] -= 1
        return self._references[page]

    def retire(self, page: int) -> None:
        """Free a page that nobody holds."""
        if self._references[page]:
            raise StateError(f"Page {page} cannot be freed: it has {self._references[page]} holders.")
        self.move(page, PageEvent.RETIRE)
        self.recharge(page, ())
        self.move(page, PageEvent.FENCE_LIFTED)
        self._generation[page] += 1
        self._free.append(page)
        if self.freed is not None:
            self.freed.add(page)

    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)
