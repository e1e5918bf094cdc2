"""EPIC-Kitchens' narrations as sentences, by rule: "open fridge" -> "You open the fridge."

The paper's sentences were written by a language model (FlowNar-Data has them). This rule is for the
owners' files. It holds where a narration begins with its verb; `data.py stats` lists the others.
"""

ARTICLES = {"the", "a", "an", "my", "your", "his", "her", "its", "their", "some", "another", "both",
            "all", "more", "less", "one", "two", "three", "four", "it", "them", "this", "that",
            "these", "those", "something", "everything", "each", "every"}
PREPOSITIONS = {"in", "into", "on", "onto", "from", "with", "to", "of", "off", "out", "over",
                "under", "around", "at", "inside", "through", "for", "behind", "between", "near",
                "against", "towards", "by", "and", "using"}
PARTICLES = {"down", "up", "off", "on", "out", "in", "away", "back", "over", "around", "together",
             "apart", "open"}
# After "and" these are verbs again, and not things: "hold and dry lid"
SECOND_VERBS = {"put", "take", "place", "pick", "open", "close", "cut", "wash", "rinse", "dry",
                "wipe", "stir", "mix", "pour", "add", "move", "turn", "throw", "hold", "peel"}
STILL = {"still", "now", "then", "again"}
# How verbs begin that can stand before another one: "continue stirring", "starting to cut"; and
# those of them that can stand before "to"
BEFORE_ING = ("continu", "start", "begin", "keep", "finish", "stop")
BEFORE_TO = ("continu", "start", "begin")


def words_of(narration: str) -> list[str]:
    """The words of an EPIC narration in lower case, without punctuation around them."""
    words = [word.strip("\"'.,;:!?()") for word in narration.lower().split()]
    return [word for word in words if word]


def is_ing(word: str) -> bool:
    return word.endswith("ing") and word not in ("bring", "wring")


def verb_at(words: list[str], base: str) -> int:
    """Where the verb of an EPIC narration stands: after "still", and after "continue" or the like.

    base: the first word of EPIC's own column, or ""
    """
    place = 0
    if words[0] in STILL and len(words) > 1:
        place = 1
    following = words[place + 1:]
    if words[place] == base or not following:
        return place
    if words[place].startswith(BEFORE_TO):
        if following[0] == "to" and len(following) > 1:
            return place + 2
        if following[0] == base:
            return place + 1
    if words[place].startswith(BEFORE_ING) and is_ing(following[0]):
        return place + 1
    return place


# what is counted, with examples, of narrations that the rule may have wrong
UNLIKE = "narrations that do not begin with their verb, as sentences perhaps wrong"


def has_verb(narration: str, verb: str) -> bool:
    """Whether an EPIC narration says its verb (EPIC's own column) where `sentence` looks for it."""
    words = words_of(narration)
    base, *_ = verb.lower().split("-")
    return not words or is_form(words[verb_at(words, base)], base)


def is_form(word: str, base: str) -> bool:
    """Is it the verb, or its form in -ing: dice, dicing; cut, cutting?"""
    return word == base or is_ing(word) and word.startswith(base.removesuffix("e"))


def sentence(narration: str, verb: str = "") -> str:
    """An EPIC narration as a sentence, by rule: "open fridge" -> "You open the fridge.",
    "put down knife on board." -> "You put down the knife on the board.",
    "still stirring pasta" -> "You are still stirring the pasta."

    verb: EPIC's own column, such as "put-down". It tells where the object begins.
    """
    words = words_of(narration)
    if not words:
        return ""
    base, *rest_of_verb = verb.lower().split("-")
    place = verb_at(words, base)
    end = place + 1                            # of the verb
    if rest_of_verb and words[end:end + len(rest_of_verb)] == rest_of_verb:
        end += len(rest_of_verb)
    elif len(words) > end + 1 and words[end] in PARTICLES:
        end += 1

    start = words[:end]
    if words[place] == base and words[place - 1].startswith(BEFORE_TO) and place > 0:
        start.insert(place, "to")              # "continue stir": You continue to stir
    first = start[1] if start[0] in STILL and len(start) > 1 else start[0]
    if is_ing(first) and first != base:
        start.insert(0, "are")                 # "still stirring": You are still stirring
    written = ["You", *start]

    noun_may_begin = True                      # after the verb, and after each preposition
    word_before = ""
    for word in words[end:]:
        is_verb = word_before == "and" and (word in SECOND_VERBS or is_ing(word))
        is_small = word in ARTICLES | PREPOSITIONS | PARTICLES or word.isdigit()
        if noun_may_begin and not is_verb and not is_small:
            written.append("the")
        written.append(word)
        noun_may_begin = is_verb or word in PREPOSITIONS
        word_before = word
    return " ".join(written) + "."
