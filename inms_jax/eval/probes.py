"""Built-in probes of what fragments cost: records to recall, text to go on with, and answers to judge.

Made from a seed. The running text is that of Python's own help pages. Knows nothing of engines.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

RECALL, TEXT, JUDGE = "recall", "text", "judge"
TASKS = (RECALL, TEXT, JUDGE)
SYSTEM = (
    "You work for the operations team of a web shop. Read what the team has written down, and answer every question "
    "from it, shortly and exactly, without words of your own."
)
OTHER_SYSTEM = "You are a careful assistant of a large company. Stay with the facts that you are given."

_SERVICES = ("billing", "search", "checkout", "the warehouse", "mail", "login", "reports", "the gateway", "payments")
_FACTS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("port", lambda r: str(r.randrange(1024, 65535))),
    ("owner", lambda r: r.choice(("Ada", "Linus", "Grace", "Edsger", "Barbara", "Donald", "Radia", "Niklaus"))),
    ("database", lambda r: r.choice(("orders", "people", "ledger", "stock", "archive", "sessions"))),
    ("region", lambda r: r.choice(("Dublin", "Oslo", "Lisbon", "Vienna", "Prague", "Madrid", "Athens"))),
    ("retry limit", lambda r: str(r.randrange(2, 60))),
    ("release day", lambda r: r.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"))),
)
_NOTES = (
    "I prefer tea to coffee.",
    "My shift ends at six today.",
    "I asked for a second monitor last week, and nobody has answered.",
    "The meeting was long, and nothing was decided in it.",
    "Somebody left the window open over the weekend.",
    "I should write to my sister about her birthday.",
    "The train was late again this morning.",
    "My desk is the one next to the printer.",
)


@dataclass(frozen=True, slots=True)
class Probe:
    """One document, what a reader has privately before it, and one question with its answer.

    wrong: of a judge's question, the answer that the document does not bear out.
    """

    task: str
    note: str
    document: str
    question: str
    answer: str
    wrong: str | None = None


def make_probes(task: str, count: int, seed: int = 0) -> tuple[Probe, ...]:
    """`count` different probes of one task."""
    rng = random.Random(f"{task}/{seed}")
    if task == TEXT:
        passages = rng.sample(_PASSAGES, count)
        return tuple(Probe(TEXT, _note(rng), document, "Go on with the text.", rest) for document, rest in passages)
    make = _recall if task == RECALL else _judge
    return tuple(make(rng) for _ in range(count))


def _note(rng: random.Random) -> str:
    return " ".join(rng.sample(_NOTES, rng.randrange(2, 6)))


def _record(rng: random.Random) -> tuple[str, list[tuple[str, str, str]]]:
    """Some running text, then a record of eight facts; and (service, attribute, value) of each."""
    pairs = rng.sample([(service, fact) for service in _SERVICES for fact in _FACTS], 8)
    facts = [(service, name, value(rng)) for service, (name, value) in pairs]
    lines = [f"The {name} of {service} is {value}." for service, name, value in facts]
    around = rng.choice(_PASSAGES)[0][:500].rsplit(" ", 1)[0]
    return f"{around} ... Decisions of the team. {' '.join(lines)}", facts


def _recall(rng: random.Random) -> Probe:
    document, facts = _record(rng)
    service, name, value = rng.choice(facts)
    question, answer = f"What is the {name} of {service}?", f"The {name} of {service} is {value}."
    return Probe(RECALL, _note(rng), document, question, answer)


def _judge(rng: random.Random) -> Probe:
    document, facts = _record(rng)
    service, name, value = rng.choice(facts)
    draw = dict(_FACTS)[name]
    wrong = value
    while wrong == value:
        wrong = draw(rng)
    right, other = (f"The {name} of {service} is {one}." for one in (value, wrong))
    return Probe(JUDGE, _note(rng), document, f"What is the {name} of {service}?", right, other)


def _passages(document: int = 900, rest: int = 200) -> Sequence[tuple[str, str]]:
    """Pieces of running text of so many characters, each with what comes next, cut between words."""
    found = []
    for name in sorted(topics):
        words = re.sub(r"\s+", " ", topics[name]).split(" ")
        text = " ".join(words)
        for start in range(0, len(text) - document - rest - 40, document + rest):
            begin = text.index(" ", start) + 1
            middle = text.index(" ", begin + document)
            found.append((text[begin:middle], text[middle + 1 : text.index(" ", middle + rest)]))
    return found


_PASSAGES = _passages()
